//! A roofline: what rows reached beside what the device could do at best, by how much is computed with a byte.

use super::{Drawing, FONT, TEXT};
use crate::{
    newest::Newest,
    peak::{Arithmetic, peak_bandwidth, peak_flops},
    row::Row,
    work::{self, Kind},
};
use anyhow::{Context, Result, ensure};
use plotters::{
    coord::Shift,
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

/// What is drawn.
pub struct Roofline {
    title: String,
    /// Bytes a second.
    bandwidth: f64,
    /// FLOP/s, and the type that they are of.
    roofs: Vec<(f64, String)>,
    points: Vec<Point>,
}

struct Point {
    /// FLOPs a byte.
    intensity: f64,
    /// FLOP/s.
    reached: f64,
    kind: Kind,
    is_ours: bool,
}

/// Kinds in the order of the legend. Told apart by the color blind, on white and on black.
const KINDS: [(Kind, &str, RGBColor); 4] = [
    (Kind::Product, "matrix products", RGBColor(0, 128, 200)),
    (Kind::Attention, "attention", RGBColor(230, 100, 20)),
    (Kind::Convolution, "convolutions", RGBColor(0, 158, 115)),
    (Kind::Rows, "norms and softmax", RGBColor(204, 121, 167)),
];

const SIZE: (u32, u32) = (860, 560);
/// Of a point, in pixels.
const RADIUS: i32 = 4;

impl Roofline {
    /// Rows of a device, by the driver's name of it. Rows whose cost is not known are left out, and of rows of the same
    /// all but the newest.
    ///
    /// # Errors
    ///
    /// When the device is not listed, or there is no row to draw.
    pub fn of_rows(rows: &[Row], device: &str, title: String) -> Result<Self> {
        let bandwidth = peak_bandwidth(device).with_context(|| {
            format!(
                "the data sheet of `{device}` is not listed in crates/train/src/throughput/peak.rs; expected the \
                 driver's name of a device, such as `NVIDIA H100 80GB HBM3`"
            )
        })?;
        let mut roofs: Vec<(f64, String)> = Vec::new();
        let mut points = Vec::new();
        for row in Newest::of(rows).rows() {
            let (Some(work), Some(median), Some(peak)) =
                (work::of(row), row.median(), peak_of(device, &row.dtype))
            else {
                continue;
            };
            points.push(Point {
                intensity: work.flops / work.bytes,
                reached: work.flops / median * 1e3,
                kind: work.kind,
                is_ours: row.is_ours(),
            });
            if work.kind != Kind::Rows && !roofs.iter().any(|(_, name)| *name == row.dtype) {
                roofs.push((peak, row.dtype.clone()));
            }
        }
        ensure!(
            !roofs.is_empty(),
            "none of {} rows is a matrix product, attention or a convolution that was timed: nothing to draw",
            rows.len()
        );
        roofs.sort_by(|a, b| a.0.total_cmp(&b.0));
        // Types of one peak have one roof.
        roofs.dedup_by(|later, first| {
            let is_alike = later.0 == first.0;
            if is_alike {
                first.1 = format!("{}, {}", first.1, later.1);
            }
            is_alike
        });
        Ok(Self { title, bandwidth, roofs, points })
    }

    /// Powers of ten around all points and roofs.
    fn ranges(&self) -> [(f64, f64); 2] {
        let around = |values: &mut dyn Iterator<Item = f64>| {
            let (least, most) = values.fold((f64::INFINITY, 0.0f64), |(least, most), value| {
                (least.min(value), most.max(value))
            });
            (10f64.powf(least.log10().floor()), 10f64.powf(most.log10().ceil()))
        };
        let ridges = self.roofs.iter().map(|(peak, _)| peak / self.bandwidth * 4.0);
        let peaks = self.roofs.iter().map(|(peak, _)| peak * 1.5);
        [
            around(&mut self.points.iter().map(|point| point.intensity).chain(ridges)),
            around(&mut self.points.iter().map(|point| point.reached).chain(peaks)),
        ]
    }
}

/// FLOP/s of a type that rows name.
fn peak_of(device: &str, dtype: &str) -> Option<f64> {
    let arithmetic = match dtype {
        "f32" => Arithmetic::F32,
        "tf32" => Arithmetic::Tf32,
        "bf16" => Arithmetic::Bf16,
        "f16" => Arithmetic::F16,
        "fp8" | "e4m3" => Arithmetic::Fp8,
        _ => return None,
    };
    peak_flops(device, arithmetic)
}

/// `2 TFLOP/s` of 2e12.
fn tera(flops: f64) -> String {
    let tera = flops / 1e12;
    if tera >= 1.0 { format!("{tera:.0}") } else { format!("{tera}") }
}

impl Drawing for Roofline {
    fn size(&self) -> (u32, u32) {
        SIZE
    }

    fn draw<B>(&self, area: &DrawingArea<B, Shift>) -> Result<()>
    where
        B: DrawingBackend,
        B::ErrorType: 'static,
    {
        let font = |size: i32| (FONT, size).into_font().color(&TEXT);
        let bold = TextStyle::from((FONT, 21, FontStyle::Bold).into_font()).color(&TEXT);
        area.draw_text(&self.title, &bold, (10, 14))?;
        let [(left, right), (bottom, top)] = self.ranges();
        let mut chart = ChartBuilder::on(area)
            .margin(16)
            .margin_top(48)
            .margin_right(30)
            .x_label_area_size(48)
            .y_label_area_size(76)
            .build_cartesian_2d((left..right).log_scale(), (bottom..top).log_scale())?;
        chart
            .configure_mesh()
            .x_desc("FLOPs a byte, each tensor moved once")
            .y_desc("TFLOP/s")
            .x_label_formatter(&|x| format!("{x}"))
            .y_label_formatter(&|y| tera(*y))
            .label_style(font(15))
            .axis_desc_style(font(17))
            .axis_style(TEXT)
            .bold_line_style(TEXT.mix(0.25))
            .light_line_style(TRANSPARENT)
            .draw()?;
        let line = TEXT.stroke_width(2);
        let highest = self.roofs.last().map_or(0.0, |(peak, _)| *peak);
        // Where the memory's roof enters the picture from the left or from below.
        let start = left.max(bottom / self.bandwidth);
        let ridge = highest / self.bandwidth;
        chart.draw_series(LineSeries::new(
            [(start, start * self.bandwidth), (ridge, highest)],
            line,
        ))?;
        let label = |text: String, at: (f64, f64), offset: (i32, i32), side: HPos| {
            let style = font(15).pos(Pos::new(side, VPos::Center));
            EmptyElement::at(at) + Text::new(text, offset, style)
        };
        for (peak, name) in &self.roofs {
            let ridge = peak / self.bandwidth;
            chart.draw_series(LineSeries::new([(ridge, *peak), (right, *peak)], line))?;
            let text = format!("{name}: {} TFLOP/s", peak / 1e12);
            chart.draw_series([label(text, (ridge, *peak), (6, -14), HPos::Left)])?;
        }
        let memory = format!("memory: {} TB/s", self.bandwidth / 1e12);
        // Beside the middle of the slope, where nothing can be reached.
        let middle = (start * ridge).sqrt();
        let at = (middle, middle * self.bandwidth);
        chart.draw_series([label(memory, at, (-10, -6), HPos::Right)])?;
        for (kind, name, color) in KINDS {
            let of = |is_ours| {
                let is_meant = move |point: &&Point| point.kind == kind && point.is_ours == is_ours;
                self.points.iter().filter(is_meant).map(|point| (point.intensity, point.reached))
            };
            if of(true).chain(of(false)).next().is_none() {
                continue;
            }
            let hollow = color.stroke_width(1);
            chart.draw_series(of(false).map(|at| Circle::new(at, RADIUS, hollow)))?;
            let full = color.mix(0.85).filled();
            chart
                .draw_series(of(true).map(|at| Circle::new(at, RADIUS, full)))?
                .label(name)
                .legend(move |(x, y)| Circle::new((x + 10, y), RADIUS, color.filled()));
        }
        if self.points.iter().any(|point| !point.is_ours) {
            chart
                .draw_series(std::iter::empty::<Circle<(f64, f64), i32>>())?
                .label("peers")
                .legend(|(x, y)| Circle::new((x + 10, y), RADIUS, TEXT.stroke_width(1)));
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::LowerRight)
            .label_font(font(15))
            .border_style(TEXT.mix(0.25))
            .draw()?;
        area.present().context("writing the picture")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{drawing::tests::drawn, row::tests::row};

    const H100: &str = "NVIDIA H100 80GB HBM3";

    fn rows() -> Vec<Row> {
        let shape = "B4H16Q4096K4096D128";
        vec![
            row(["matmul", "forward", "bf16", "4096x4096x4096", "blackburn", "9", "-", "-", "NN"]),
            row([
                "matmul",
                "forward",
                "bf16",
                "4096x4096x4096",
                "blackburn",
                "0.2",
                "-",
                "-",
                "NN",
            ]),
            row(["matmul", "forward", "f16", "64x64x64", "torch", "0.01", "-", "-", "NN"]),
            row([
                "matmul",
                "forward",
                "e4m3",
                "4096x4096x4096",
                "blackburn",
                "0.1",
                "-",
                "-",
                "NT",
            ]),
            row(["attention", "forward", "bf16", shape, "blackburn", "1", "-", "-", ""]),
            row([
                "layer_norm",
                "forward",
                "bf16",
                "65536x4096",
                "blackburn",
                "0.4",
                "2600",
                "GB/s",
                "",
            ]),
            row(["sum", "forward", "bf16", "65536x4096", "blackburn", "0.4", "2600", "GB/s", ""]),
        ]
    }

    #[test]
    fn the_newest_row_of_each_is_a_point_under_the_roofs_of_its_type() {
        let roofline = Roofline::of_rows(&rows(), H100, "Roofline".into()).unwrap();
        assert_eq!(roofline.points.len(), 5);
        let product = &roofline.points[0];
        assert_eq!(product.reached, 2.0 * 4096f64.powi(3) / 0.2e-3);
        assert_eq!(product.intensity, 4096.0 / 3.0);
        let roofs: Vec<_> =
            roofline.roofs.iter().map(|(peak, name)| (*peak, name.as_str())).collect();
        assert_eq!(roofs, [(989.5e12, "bf16, f16"), (1979e12, "e4m3")]);
        let (svg, size) = drawn(&roofline);
        assert_eq!(size, SIZE);
        for label in [
            "Roofline",
            "bf16, f16: 989.5 TFLOP/s",
            "e4m3: 1979 TFLOP/s",
            "memory: 3.35 TB/s",
            "matrix products",
            "attention",
            "norms and softmax",
            "peers",
        ] {
            assert!(svg.contains(label), "{label} in {svg}");
        }
        assert!(!svg.contains("convolutions"), "there is none: {svg}");
        // Five points, and the legend's four.
        assert_eq!(svg.matches("<circle").count(), 9, "{svg}");
    }

    #[test]
    fn unknown_devices_and_rows_without_products_are_errors() {
        let error = |rows: &[Row], device: &str| {
            Roofline::of_rows(rows, device, String::new()).err().unwrap().to_string()
        };
        assert!(error(&rows(), "llvmpipe").contains("data sheet of `llvmpipe` is not listed"));
        assert!(error(&rows()[6..], H100).starts_with("none of 1 rows is a matrix product"));
    }
}
