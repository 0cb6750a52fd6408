//! What devices could do at best, from their makers' data sheets.

/// The arithmetic of matrix products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Arithmetic {
    /// 32-bit floats, without tensor cores.
    F32,
    /// TF32 on tensor cores.
    Tf32,
    /// bfloat16 on tensor cores, sums in f32.
    Bf16,
    /// Half precision on tensor cores, sums in f32.
    F16,
    /// 8-bit floats on tensor cores, sums in f32.
    Fp8,
}

/// Peaks of one device in TFLOP/s, dense: half of what data sheets print for sparse matrices.
struct Device {
    /// In the driver's name of the device, all of these.
    names: &'static [&'static str],
    /// And none of these: other products whose names contain the above.
    except: &'static [&'static str],
    f32: f64,
    tf32: f64,
    /// bf16 and f16 alike, with sums in f32: consumer cards do twice that with sums in f16, which
    /// training does not use.
    half: f64,
    fp8: Option<f64>,
    /// GB/s of its memory, by a part of the name that tells its forms apart.
    bandwidth: &'static [(&'static str, f64)],
}

const DEVICES: [Device; 8] = [
    // "NVIDIA A100 Tensor Core GPU" data sheet; PCIe and SXM alike.
    Device {
        names: &["A100"],
        except: &["A1000", "MIG"],
        f32: 19.5,
        tf32: 156.0,
        half: 312.0,
        fp8: None,
        bandwidth: &[("80GB PCIe", 1935.0), ("80GB", 2039.0), ("40GB", 1555.0)],
    },
    // "NVIDIA H100 Tensor Core GPU" data sheet, column PCIe.
    Device {
        names: &["H100", "PCIe"],
        except: &["MIG"],
        f32: 51.0,
        tf32: 378.0,
        half: 756.0,
        fp8: Some(1513.0),
        bandwidth: &[("", 2000.0)],
    },
    // The same, column SXM; the driver calls it "NVIDIA H100 80GB HBM3".
    Device {
        names: &["H100"],
        except: &["PCIe", "NVL", "MIG"],
        f32: 67.0,
        tf32: 494.5,
        half: 989.5,
        fp8: Some(1979.0),
        bandwidth: &[("", 3350.0)],
    },
    // "NVIDIA H200 Tensor Core GPU" data sheet, column SXM.
    Device {
        names: &["H200"],
        except: &["GH200", "NVL", "MIG"],
        f32: 67.0,
        tf32: 494.5,
        half: 989.5,
        fp8: Some(1979.0),
        bandwidth: &[("", 4800.0)],
    },
    // "NVIDIA Blackwell Architecture Technical Brief", HGX B200 at 1000 W.
    Device {
        names: &["B200"],
        except: &["GB200", "MIG"],
        f32: 80.0,
        tf32: 1100.0,
        half: 2250.0,
        fp8: Some(4500.0),
        bandwidth: &[("", 8000.0)],
    },
    // "NVIDIA Ada GPU Architecture" white paper, appendix A.
    Device {
        names: &["RTX 4090"],
        except: &["RTX 4090 D", "Laptop"],
        f32: 82.6,
        tf32: 82.6,
        half: 165.2,
        fp8: Some(330.3),
        bandwidth: &[("", 1008.0)],
    },
    // "NVIDIA RTX Blackwell GPU Architecture" white paper, appendix A.
    Device {
        names: &["RTX 5090"],
        except: &["RTX 5090 D", "Laptop"],
        f32: 104.8,
        tf32: 104.8,
        half: 209.5,
        fp8: Some(419.0),
        bandwidth: &[("", 1792.0)],
    },
    // "NVIDIA L40S" data sheet.
    Device {
        names: &["L40S"],
        except: &[],
        f32: 91.6,
        tf32: 183.0,
        half: 362.0,
        fp8: Some(733.0),
        bandwidth: &[("", 864.0)],
    },
];

/// Operations per second that a device can do at best with dense matrices, by the name that its
/// driver gives it, such as `NVIDIA H100 80GB HBM3`. `None` for devices that are not listed, and
/// for arithmetic that the device does not have.
///
/// Listed are A100, H100 (SXM and PCI Express), H200 (SXM), B200, RTX 4090, RTX 5090 and L40S, with the
/// figures of NVIDIA's data sheets and white papers. A limit on power or clocks lowers what can be
/// reached.
pub fn peak_flops(device: &str, arithmetic: Arithmetic) -> Option<f64> {
    let found = found(device)?;
    let tflops = match arithmetic {
        Arithmetic::F32 => found.f32,
        Arithmetic::Tf32 => found.tf32,
        Arithmetic::Bf16 | Arithmetic::F16 => found.half,
        Arithmetic::Fp8 => found.fp8?,
    };
    Some(tflops * 1e12)
}

/// Bytes per second that a device's memory can move at best, of the devices of [`peak_flops`] and by the same sources.
/// `None` for other devices, and where the name does not tell which memory it has.
pub fn peak_bandwidth(device: &str) -> Option<f64> {
    let forms = found(device)?.bandwidth;
    forms.iter().find(|(part, _)| device.contains(part)).map(|(_, rate)| rate * 1e9)
}

fn found(device: &str) -> Option<&'static Device> {
    let contains = |part: &&str| device.contains(*part);
    DEVICES
        .iter()
        .find(|known| known.names.iter().all(contains) && !known.except.iter().any(contains))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_found_by_the_drivers_name() {
        for (name, bf16) in [
            ("NVIDIA A100-SXM4-80GB", 312e12),
            ("NVIDIA A100 80GB PCIe", 312e12),
            ("NVIDIA H100 PCIe", 756e12),
            ("NVIDIA H100 80GB HBM3", 989.5e12),
            ("NVIDIA H200", 989.5e12),
            ("NVIDIA B200", 2250e12),
            ("NVIDIA GeForce RTX 4090", 165.2e12),
            ("NVIDIA GeForce RTX 5090", 209.5e12),
            ("NVIDIA L40S", 362e12),
        ] {
            assert_eq!(peak_flops(name, Arithmetic::Bf16), Some(bf16), "{name}");
            assert_eq!(peak_flops(name, Arithmetic::F16), Some(bf16), "{name}");
        }
    }

    #[test]
    fn similar_names_are_other_devices() {
        for name in [
            "NVIDIA RTX A1000",
            "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
            "NVIDIA H100 NVL",
            "NVIDIA H200 NVL",
            "NVIDIA GH200 480GB",
            "NVIDIA GB200",
            "NVIDIA GeForce RTX 4090 D",
            "NVIDIA GeForce RTX 4090 Laptop GPU",
            "NVIDIA GeForce RTX 5090 Laptop GPU",
            "NVIDIA L40",
            "llvmpipe",
            "",
        ] {
            assert_eq!(peak_flops(name, Arithmetic::Bf16), None, "{name}");
        }
    }

    #[test]
    fn ampere_has_no_8_bit_floats() {
        assert_eq!(peak_flops("NVIDIA A100-SXM4-80GB", Arithmetic::Fp8), None);
        assert_eq!(peak_flops("NVIDIA A100-SXM4-80GB", Arithmetic::Tf32), Some(156e12));
    }

    #[test]
    fn memory_is_told_apart_by_the_form_of_a_device() {
        for (name, bandwidth) in [
            ("NVIDIA A100-SXM4-80GB", Some(2039e9)),
            ("NVIDIA A100 80GB PCIe", Some(1935e9)),
            ("NVIDIA A100-PCIE-40GB", Some(1555e9)),
            ("NVIDIA A100", None),
            ("NVIDIA H100 PCIe", Some(2000e9)),
            ("NVIDIA H100 80GB HBM3", Some(3350e9)),
            ("NVIDIA H200", Some(4800e9)),
            ("NVIDIA B200", Some(8000e9)),
            ("llvmpipe", None),
        ] {
            assert_eq!(peak_bandwidth(name), bandwidth, "{name}");
        }
    }

    #[test]
    fn narrower_arithmetic_is_never_slower() {
        for device in &DEVICES {
            assert!(device.f32 <= device.tf32 && device.tf32 <= device.half);
            assert!(device.fp8.is_none_or(|fp8| device.half <= fp8));
        }
    }
}
