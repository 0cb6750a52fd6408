//! The loss curve of a run.

use std::ops::Range;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use plotters::coord::Shift;
use plotters::prelude::*;

use crate::metrics::MetricRecord;
use crate::picture::{self, BLUE as TRAIN, Drawing, FONT, GRID, ORANGE as VALIDATION, TEXT};

/// Points a line keeps: about one a pixel column, with the extremes of each.
const MAX_POINTS: usize = 2000;

type Point = (u64, f64);

/// Draws the losses of `records` against the step, into both files. Values that are not finite
/// are left out.
pub(crate) fn render_loss_curve(
    records: &[MetricRecord],
    title: &str,
    svg: &Path,
    png: &Path,
) -> Result<()> {
    picture::write(&LossCurve { curves: Curves::from_records(records)?, title }, svg, png)
}

/// The picture: the curves under a title.
struct LossCurve<'a> {
    curves: Curves,
    title: &'a str,
}

struct Curves {
    train: Vec<Point>,
    smooth: Vec<Point>,
    validation: Vec<Point>,
    /// Records that weigh in the smoothed line.
    span: usize,
}

impl Curves {
    fn from_records(records: &[MetricRecord]) -> Result<Self> {
        let (mut train, mut validation) = (Vec::new(), Vec::new());
        for record in records {
            match record {
                MetricRecord::Train { step, loss, .. } if loss.is_finite() => {
                    train.push((*step, f64::from(*loss)));
                }
                MetricRecord::Validation { step, loss, .. } if loss.is_finite() => {
                    validation.push((*step, *loss));
                }
                _ => {}
            }
        }
        ensure!(
            !train.is_empty() || !validation.is_empty(),
            "nothing to plot: none of the {} records holds a finite loss",
            records.len()
        );
        // Long runs are smoothed more, but the line lags by less than a hundredth of the chart;
        // below 300 records nothing is smoothed.
        let span = (train.len() / 150).clamp(1, 100);
        let smooth = thin(&smooth(&train, span));
        Ok(Self { train: thin(&train), smooth, validation, span })
    }

    fn points(&self) -> impl Iterator<Item = &Point> {
        self.train.iter().chain(&self.validation)
    }

    fn steps(&self) -> Range<u64> {
        let first = self.points().map(|point| point.0).min().unwrap_or(0);
        let last = self.points().map(|point| point.0).max().unwrap_or(0);
        // A run is shown from its beginning, unless only a late part of it was recorded.
        let first = if first <= last / 10 { 0 } else { first };
        let end = last + (last - first).div_ceil(50);
        if first < end { first..end } else { first.saturating_sub(1)..last + 1 }
    }

    fn losses(&self) -> Range<f64> {
        let (low, high) = self.points().fold((f64::INFINITY, f64::NEG_INFINITY), |range, point| {
            (range.0.min(point.1), range.1.max(point.1))
        });
        // At least a tenth of a nat in all, within which a flat line is shown as flat.
        let margin = (0.05 * (high - low)).max(0.05);
        low - margin..high + margin
    }
}

impl Drawing for LossCurve<'_> {
    fn draw<B>(&self, area: &DrawingArea<B, Shift>, scale: u32) -> Result<()>
    where
        B: DrawingBackend,
        B::ErrorType: 'static,
    {
        let Self { curves, title } = self;
        let px = |length: i32| length * scale as i32;
        let font = |size: i32| (FONT, px(size)).into_font().color(&TEXT);
        let (steps, losses) = (curves.steps(), curves.losses());
        let decimals = decimals(&losses);

        area.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(area)
            .caption(*title, font(28))
            .margin(px(20))
            .margin_right(px(30))
            .x_label_area_size(px(60))
            .y_label_area_size(px(80))
            .build_cartesian_2d(steps, losses)?;
        chart
            .configure_mesh()
            .x_desc("step")
            .y_desc("loss (nats per token)")
            .x_labels(11)
            .y_labels(10)
            .x_label_formatter(&|step| thousands(*step))
            .y_label_formatter(&|loss| format!("{loss:.decimals$}"))
            .set_all_tick_mark_size(px(5))
            .label_style(font(18))
            .axis_desc_style(font(20))
            .axis_style(TEXT.stroke_width(scale))
            .bold_line_style(GRID.stroke_width(scale))
            .light_line_style(TRANSPARENT)
            .draw()?;

        if curves.span > 1 {
            // Always one pixel wide: the corners of a thicker zigzag are drawn as spikes.
            let faint = TRAIN.mix(0.35 * f64::from(scale));
            chart
                .draw_series(LineSeries::new(curves.train.iter().copied(), faint))?
                .label("training")
                .legend(move |(x, y)| PathElement::new([(x, y), (x + px(30), y)], faint));
        }
        if !curves.train.is_empty() {
            let strong = TRAIN.stroke_width(3 * scale);
            // A single point makes no line.
            let dots = curves.smooth.iter().filter(|_| curves.smooth.len() == 1);
            chart.draw_series(dots.map(|point| Circle::new(*point, px(5), TRAIN.filled())))?;
            chart
                .draw_series(LineSeries::new(curves.smooth.iter().copied(), strong))?
                .label(match curves.span {
                    1 => "training".to_owned(),
                    span => format!("training, moving average of {span} records"),
                })
                .legend(move |(x, y)| PathElement::new([(x, y), (x + px(30), y)], strong));
        }
        if !curves.validation.is_empty() {
            let line = VALIDATION.filled().stroke_width(2 * scale);
            let points = curves.validation.iter().copied();
            chart
                .draw_series(LineSeries::new(points, line).point_size(4 * scale))?
                .label("validation")
                .legend(move |(x, y)| PathElement::new([(x, y), (x + px(30), y)], line));
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .margin(px(16))
            .legend_area_size(px(45))
            .label_font(font(18))
            .background_style(WHITE.mix(0.9))
            .border_style(GRID.stroke_width(scale))
            .draw()?;
        area.present().context("writing the picture")
    }
}

/// Exponential moving average over about `span` points, freed from the bias towards its start.
fn smooth(points: &[Point], span: usize) -> Vec<Point> {
    let decay = 1.0 - 1.0 / span as f64;
    let (mut sum, mut weight) = (0.0, 0.0);
    let average = |&(step, loss): &Point| {
        sum = decay * sum + loss;
        weight = decay * weight + 1.0;
        (step, sum / weight)
    };
    points.iter().map(average).collect()
}

/// At most about [`MAX_POINTS`]: the lowest and the highest of each group of neighbours, which
/// draw the same picture.
fn thin(points: &[Point]) -> Vec<Point> {
    if points.len() <= MAX_POINTS {
        return points.to_vec();
    }
    let mut kept = Vec::with_capacity(MAX_POINTS + 2);
    for group in points.chunks(points.len().div_ceil(MAX_POINTS / 2)) {
        let extremes = || group.iter().enumerate();
        let low = extremes().min_by(|a, b| a.1.1.total_cmp(&b.1.1)).map_or(0, |low| low.0);
        let high = extremes().max_by(|a, b| a.1.1.total_cmp(&b.1.1)).map_or(0, |high| high.0);
        kept.push(group[low.min(high)]);
        if low != high {
            kept.push(group[low.max(high)]);
        }
    }
    kept
}

/// As many as neighbouring tick labels, a tenth of the range apart, need to differ.
fn decimals(range: &Range<f64>) -> usize {
    (-((range.end - range.start) / 10.0).log10()).ceil().clamp(1.0, 6.0) as usize
}

fn thousands(step: u64) -> String {
    let digits = step.to_string();
    let mut grouped = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn train(step: u64, loss: f32) -> MetricRecord {
        MetricRecord::Train {
            step,
            loss,
            learning_rate: 1e-3,
            gradient_norm: 1.0,
            scaler: None,
            reserved_bytes: None,
            in_use_bytes: None,
            moving_ms: None,
            tokens_per_second: 1.0,
            tokens: 1,
            seconds: 1.0,
        }
    }

    fn validation(step: u64, loss: f64) -> MetricRecord {
        MetricRecord::Validation { step, loss, perplexity: loss.exp(), tokens: 1, seconds: 1.0 }
    }

    fn render(records: &[MetricRecord]) -> Result<(String, Vec<u8>)> {
        let dir = tempfile::tempdir()?;
        let (svg, png) = (dir.path().join("loss.svg"), dir.path().join("loss.png"));
        render_loss_curve(records, "loss of <a> & b", &svg, &png)?;
        assert_eq!(fs::read_dir(dir.path())?.count(), 2, "temporary files are left");
        Ok((fs::read_to_string(svg)?, fs::read(png)?))
    }

    #[test]
    fn both_pictures_are_complete_from_one_point_to_thousands() {
        let long: Vec<_> =
            (0..9000).map(|step| train(step, 3.0)).chain([validation(9, 2.5)]).collect();
        for records in [&long[..], &long[..1], &long[5000..5001], &long[9000..]] {
            let (svg, png) = render(records).expect("pictures");
            assert!(svg.trim_end().ends_with("</svg>") && svg.len() < 200_000);
            assert!(
                svg.contains("font-family=\"sans-serif\"") && svg.contains("&lt;a&gt; &amp; b")
            );
            assert!(svg.contains("loss (nats per token)"));
            assert!(png.starts_with(b"\x89PNG\r\n\x1a\n"));
            // The header's width and height.
            assert_eq!(png[16..24], [0, 0, 0x04, 0xb0, 0, 0, 0x02, 0xbc]);
        }
    }

    #[test]
    fn nothing_finite_to_plot_is_a_clear_error() {
        for records in [vec![], vec![train(1, f32::NAN), validation(1, f64::INFINITY)]] {
            let error = render(&records).expect_err("no finite loss").to_string();
            assert!(error.contains("nothing to plot"), "{error}");
        }
    }

    #[test]
    fn values_that_are_not_finite_leave_the_ranges_alone() {
        let records = [train(1, 4.0), train(2, f32::NAN), train(3, 2.0), train(4, f32::INFINITY)];
        let curves = Curves::from_records(&records).expect("curves");
        assert_eq!(curves.train, [(1, 4.0), (3, 2.0)]);
        assert!(curves.losses().start > 1.8 && curves.losses().end < 4.2);
    }

    #[test]
    fn the_smoothed_line_is_unbiased_at_its_start() {
        let constant: Vec<Point> = (0..50).map(|step| (step, 7.0)).collect();
        for (_, loss) in smooth(&constant, 20) {
            assert!((loss - 7.0).abs() < 1e-12, "{loss}");
        }
    }

    #[test]
    fn thinning_keeps_order_and_extremes() {
        let mut points: Vec<Point> = (0..100_000).map(|step| (step, 1.0)).collect();
        points[31_234].1 = 50.0;
        points[77_777].1 = -50.0;
        let thinned = thin(&points);
        assert!(thinned.len() <= MAX_POINTS + 2);
        assert!(thinned.is_sorted_by_key(|point| point.0));
        assert!(thinned.contains(&(31_234, 50.0)) && thinned.contains(&(77_777, -50.0)));
    }

    #[test]
    fn tick_labels_are_grouped_and_distinct() {
        assert_eq!([0, 999, 1000, 1_234_567].map(thousands), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!([0.0..9.0, 3.0..3.5, 3.0..3.1].map(|range| decimals(&range)), [1, 2, 2]);
    }
}
