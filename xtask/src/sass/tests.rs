//! The whole check on hand-written kernels, each with one known property.

use super::*;

/// Nothing to complain about.
const CLEAN: &str = r#"
extern "C" __global__ void clean(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] * 2.0f;
}"#;

/// 128 values are alive across a barrier, and 1024 threads leave each 64 registers.
const SPILLING: &str = r#"
extern "C" __global__ void __launch_bounds__(1024) spilling(const float* x, float* y) {
    float v[128];
    #pragma unroll
    for (int i = 0; i < 128; i++) v[i] = x[i * 1024 + threadIdx.x];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 128; i++) y[i * 1024 + threadIdx.x] = v[i] * v[127 - i];
}"#;

/// A real tensor-core instruction, through the header that `CubeCL` includes too.
const TENSOR: &str = r#"
#include <mma.h>
#include <cuda_fp16.h>
using namespace nvcuda;
extern "C" __global__ void tensor(const __half* a, const __half* b, float* c) {
    wmma::fragment<wmma::matrix_a, 16, 16, 16, __half, wmma::row_major> fa;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, __half, wmma::col_major> fb;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> fc;
    wmma::fill_fragment(fc, 0.0f);
    wmma::load_matrix_sync(fa, a, 16);
    wmma::load_matrix_sync(fb, b, 16);
    wmma::mma_sync(fc, fa, fb, fc);
    wmma::store_matrix_sync(c, fc, 16, wmma::mem_row_major);
}"#;

/// The compiler is not to merge it with its caller.
const CALLING: &str = r#"
__device__ __noinline__ float twice(float x, int n) {
    for (int i = 0; i < n; i++) x = x * x + 1.0f;
    return x;
}
extern "C" __global__ void calling(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] = twice(x[i], n) / twice(x[i + 1], n + 1);
}"#;

/// A copy to several cubes of a cluster: Hopper and its successors in data centers have it, and the others'
/// compilers call the driver.
const MULTICAST: &str = r#"
struct alignas(128) Map { unsigned long long opaque[16]; };
extern "C" __global__ void multicast(const __grid_constant__ Map map, float* y) {
    extern __shared__ __align__(128) unsigned char tile[];
    unsigned int at = (unsigned int)__cvta_generic_to_shared(tile), barrier = at + 1024;
    unsigned short mask = 3;
    unsigned long long address = (unsigned long long)&map;
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
        :: "r"(at), "l"(address), "r"(0), "r"(0), "r"(barrier), "h"(mask) : "memory");
    y[threadIdx.x] = ((float*)tile)[threadIdx.x];
}"#;

const BROKEN: &str = "extern \"C\" __global__ void broken() { undeclared(); }";

fn job(name: &str, tensor_core: Option<&str>, architecture: &str) -> (Kernel, String) {
    let kernel = Kernel {
        name: name.into(),
        file: format!("{name}.cu"),
        entry: name.into(),
        architectures: vec![architecture.into()],
        tensor_core: tensor_core.map(Into::into),
        max_registers: None,
        spill_bytes: 0,
        shared_memory_bytes: 0,
    };
    (kernel, architecture.into())
}

#[test]
#[ignore = "fetches the CUDA compilers, 140 MB; `cargo xtask test -p xtask -- --ignored` runs it"]
fn the_check_passes_clean_kernels_and_fails_planted_faults() {
    let folder = std::env::temp_dir().join(format!("sass-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let sources = [
        ("clean", CLEAN),
        ("spilling", SPILLING),
        ("tensor", TENSOR),
        ("calling", CALLING),
        ("multicast", MULTICAST),
        ("broken", BROKEN),
    ];
    for (name, source) in sources {
        fs::write(folder.join(format!("{name}.cu")), source).unwrap();
    }
    let toolkit = Toolkit::locate().unwrap();
    let nvrtc = Nvrtc::load(&toolkit.nvrtc).unwrap();
    let known = nvrtc.architectures().unwrap();
    for capability in [80, 89, 90, 100, 103, 120, 121] {
        assert!(known.contains(&capability), "{capability} is none of {known:?}");
    }
    let bench = Bench { toolkit, nvrtc, sources: folder.clone(), keep: folder.clone() };
    for architecture in ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a"] {
        let jobs = [
            job("clean", None, architecture),
            job("tensor", Some("HMMA"), architecture),
            job("spilling", None, architecture),
            job("clean", Some("HMMA"), architecture),
            job("broken", None, architecture),
            job("calling", None, architecture),
        ];
        let verdicts: Vec<_> =
            jobs.iter().map(|(kernel, arch)| bench.check(kernel, arch).unwrap()).collect();
        let [clean, tensor, spilling, without, broken, calling] = &verdicts[..] else {
            unreachable!()
        };
        assert_eq!(clean.faults, Vec::<String>::new(), "{clean:?}");
        assert_eq!(tensor.faults, Vec::<String>::new(), "{tensor:?}");
        assert_eq!(spilling.faults, ["registers spill"], "{spilling:?}");
        assert_eq!(without.faults, ["no HMMA"], "{without:?}");
        assert_eq!(broken.faults, ["NVRTC refuses it"], "{broken:?}");
        assert_eq!(calling.faults, ["$calling$_Z5twicefi is called"], "{calling:?}");
        assert!(broken.log.as_ref().unwrap().contains("undeclared"), "{broken:?}");
    }
    let multicast = |architecture| {
        let (kernel, architecture) = job("multicast", None, architecture);
        bench.check(&kernel, &architecture).unwrap().faults.join("; ")
    };
    for architecture in ["sm_90a", "sm_100a", "sm_103a"] {
        assert_eq!(multicast(architecture), "", "{architecture}");
    }
    for architecture in ["sm_120a", "sm_121a"] {
        let faults = multicast(architecture);
        assert!(faults.contains("__cuda_syscall_cp_async_bulk_tensor"), "{architecture}: {faults}");
    }
    fs::remove_dir_all(&folder).unwrap();
}
