//! Loss and accuracy by step.

use super::{BLUE, Drawing, FONT, GRID, ORANGE, TEXT};
use crate::metrics::MetricRecord;
use anyhow::{Context, Result, ensure};
use plotters::{coord::Shift, prelude::*};
use std::ops::Range;

type Point = (f64, f64);

/// Two charts side by side: the losses, and the shares of images told right.
pub(crate) struct Curves {
    title: String,
    train: Vec<Point>,
    validation: Vec<Point>,
    top1: Vec<Point>,
    top5: Vec<Point>,
}

impl Curves {
    /// Values that are not finite are left out.
    ///
    /// # Errors
    ///
    /// When none is left.
    pub(crate) fn new(records: &[MetricRecord], title: String) -> Result<Self> {
        let mut curves = Self {
            title,
            train: Vec::new(),
            validation: Vec::new(),
            top1: Vec::new(),
            top5: Vec::new(),
        };
        for record in records {
            match record {
                MetricRecord::Train { step, loss, .. } if loss.is_finite() => {
                    curves.train.push((*step as f64, f64::from(*loss)));
                }
                MetricRecord::Validation { step, loss, top1, top5, .. } if loss.is_finite() => {
                    curves.validation.push((*step as f64, *loss));
                    curves.top1.push((*step as f64, 100.0 * top1));
                    curves.top5.push((*step as f64, 100.0 * top5));
                }
                _ => {}
            }
        }
        ensure!(
            !curves.train.is_empty() || !curves.validation.is_empty(),
            "nothing to plot: none of the {} records holds a finite loss",
            records.len()
        );
        Ok(curves)
    }

    fn steps(&self) -> Range<f64> {
        let all = self.train.iter().chain(&self.validation);
        0.0..all.map(|point| point.0).fold(1.0, f64::max)
    }
}

/// A line with its name and color.
type Line<'a> = (&'static str, RGBColor, &'a [Point]);

impl Drawing for Curves {
    fn size(&self) -> (u32, u32) {
        (1400, 600)
    }

    fn draw<B>(&self, area: &DrawingArea<B, Shift>) -> Result<()>
    where
        B: DrawingBackend,
        B::ErrorType: 'static,
    {
        area.fill(&WHITE)?;
        let font = (FONT, 24).into_font().color(&TEXT);
        let area = area.titled(&self.title, font)?;
        let (left, right) = area.split_horizontally(700);
        let losses = [
            ("training, with label smoothing", BLUE, &self.train[..]),
            ("validation", ORANGE, &self.validation[..]),
        ];
        let most = losses.iter().flat_map(|line| line.2).map(|point| point.1).fold(0.1, f64::max);
        self.chart(&left, "loss (nats)", 0.0..1.05 * most, &losses)?;
        let shares =
            [("likeliest class", BLUE, &self.top1[..]), ("five likeliest", ORANGE, &self.top5[..])];
        self.chart(&right, "held-out images told right (%)", 0.0..102.0, &shares)?;
        area.present().context("writing the picture")
    }
}

impl Curves {
    fn chart<B>(
        &self,
        area: &DrawingArea<B, Shift>,
        label: &str,
        values: Range<f64>,
        lines: &[Line<'_>],
    ) -> Result<()>
    where
        B: DrawingBackend,
        B::ErrorType: 'static,
    {
        let font = |size: i32| (FONT, size).into_font().color(&TEXT);
        let mut chart = ChartBuilder::on(area)
            .margin(20)
            .x_label_area_size(50)
            .y_label_area_size(70)
            .build_cartesian_2d(self.steps(), values)?;
        chart
            .configure_mesh()
            .x_desc("step")
            .y_desc(label)
            .x_label_formatter(&|step| format!("{step:.0}"))
            .label_style(font(15))
            .axis_desc_style(font(17))
            .bold_line_style(GRID)
            .light_line_style(TRANSPARENT)
            .draw()?;
        for (name, color, points) in lines.iter().filter(|line| !line.2.is_empty()) {
            let (color, few) = (*color, points.len() < 60);
            let style = color.filled().stroke_width(2);
            let series = LineSeries::new(points.iter().copied(), style);
            chart
                .draw_series(series.point_size(if few { 3 } else { 0 }))?
                .label(*name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 24, y)], style));
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::MiddleRight)
            .label_font(font(15))
            .background_style(WHITE.mix(0.9))
            .border_style(GRID)
            .draw()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pictures::tests::drawn;

    fn validation(step: u64, loss: f64) -> MetricRecord {
        let (top1, top5) = (0.25, 0.5);
        MetricRecord::Validation {
            step,
            loss,
            top1,
            top5,
            images: 8,
            averaged: false,
            seconds: 1.0,
        }
    }

    #[test]
    fn one_record_is_enough_and_none_is_a_clear_error() {
        let curves = Curves::new(&[validation(5, 2.0)], "a <run>".into()).expect("a curve");
        let (svg, size) = drawn(&curves);
        assert_eq!(size, (1400, 600));
        assert!(svg.contains("a &lt;run&gt;") && svg.contains("five likeliest"), "{svg}");
        assert!(!svg.contains("with label smoothing"), "there was no training");
        let error = Curves::new(&[validation(5, f64::NAN)], String::new()).map(drop);
        assert!(error.expect_err("nothing").to_string().contains("nothing to plot"));
    }
}
