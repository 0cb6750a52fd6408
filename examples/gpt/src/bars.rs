//! A step's profile as bars: kernels and gaps, and below them the kernels that take longest.

use crate::picture::{BLUE, Drawing, FONT, GRID, ORANGE, TEXT};
use anyhow::{Context, Result};
use blackburn::train::profile::StepProfile;
use plotters::{
    coord::Shift,
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

/// Kernels with a bar of their own.
const MOST_KERNELS: usize = 14;
/// Where bars begin, and where the longest ends.
const LEFT: i32 = 330;
const RIGHT: i32 = 1000;
/// Where the first bar is, and how far the next is below.
const TOP: i32 = 90;
const ROW: i32 = 36;
const THICKNESS: i32 = 22;
/// Letters that fit to the left of the bars.
const NAME: usize = 34;

/// What is drawn.
pub(crate) struct Bars {
    title: String,
    bars: Vec<Bar>,
}

struct Bar {
    name: String,
    value: String,
    /// Microseconds and colors, one after the other.
    parts: Vec<(f64, RGBColor)>,
}

impl Bars {
    pub(crate) fn new(profile: &StepProfile) -> Self {
        let ms = |us: f64| format!("{:.3} ms", us / 1e3);
        let title = format!("{}: a step of {}", profile.device, ms(profile.wall_us));
        let step = match (profile.device_us, profile.gap_us) {
            (Some(device), Some(gap)) => Bar {
                name: "kernels and gaps".into(),
                value: format!("{} and {}", ms(device), ms(gap)),
                parts: vec![(device, BLUE), (gap, ORANGE)],
            },
            _ => Bar {
                name: "step (kernels not timed)".into(),
                value: ms(profile.wall_us),
                parts: vec![(profile.wall_us, ORANGE)],
            },
        };
        let kernel = |(name, time, launches): (String, f64, f64)| Bar {
            name,
            value: format!("{}, {launches:.0} x", ms(time)),
            parts: vec![(time, BLUE)],
        };
        let (own, rest) = profile.kernels.split_at(profile.kernels.len().min(MOST_KERNELS));
        let own =
            own.iter().filter_map(|row| Some((row.name.clone(), row.total_us?, row.launches)));
        let rest = (!rest.is_empty()).then(|| {
            let time = rest.iter().filter_map(|row| row.total_us).sum();
            (
                format!("{} other kernels", rest.len()),
                time,
                rest.iter().map(|row| row.launches).sum(),
            )
        });
        Self { title, bars: std::iter::once(step).chain(own.chain(rest).map(kernel)).collect() }
    }
}

impl Drawing for Bars {
    fn draw<B>(&self, area: &DrawingArea<B, Shift>, scale: u32) -> Result<()>
    where
        B: DrawingBackend,
        B::ErrorType: 'static,
    {
        let px = |length: i32| length * scale as i32;
        let at = |x: i32, y: i32| (px(x), px(y));
        let text = |size: i32, anchor: HPos| {
            let font = (FONT, px(size)).into_font().color(&TEXT);
            font.pos(Pos::new(anchor, VPos::Center))
        };
        let total = |bar: &Bar| bar.parts.iter().map(|part| part.0).sum::<f64>();
        let longest = self.bars.iter().map(total).fold(f64::MIN_POSITIVE, f64::max);

        area.fill(&WHITE)?;
        area.draw(&Text::new(self.title.clone(), at(30, 40), text(24, HPos::Left)))?;
        area.draw(&PathElement::new(
            [at(LEFT, TOP - ROW / 2), at(LEFT, TOP + ROW * self.bars.len() as i32 - ROW / 2)],
            GRID.stroke_width(2 * scale),
        ))?;
        for (row, bar) in self.bars.iter().enumerate() {
            let y = TOP + ROW * row as i32;
            let name: String = bar.name.chars().take(NAME).collect();
            area.draw(&Text::new(name, at(LEFT - 10, y), text(15, HPos::Right)))?;
            let mut begin = 0.0;
            let x = |time: f64| LEFT + (f64::from(RIGHT - LEFT) * time / longest).round() as i32;
            for (time, color) in &bar.parts {
                let corners =
                    [at(x(begin), y - THICKNESS / 2), at(x(begin + time), y + THICKNESS / 2)];
                area.draw(&Rectangle::new(corners, color.filled()))?;
                begin += time;
            }
            area.draw(&Text::new(bar.value.clone(), at(x(begin) + 8, y), text(15, HPos::Left)))?;
        }
        area.present().context("writing the picture")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::picture;
    use std::fs;

    fn profile(kernels: usize) -> StepProfile {
        let row = |index: usize| {
            serde_json::json!({
                "name": format!("kernel_{index}<&>"), "of": "burn", "launches": 2.0,
                "total_us": 100.0 - index as f64, "mean_us": null, "share": null, "bytes": null,
                "flops": null, "roofline": null,
            })
        };
        let is_timed = kernels > 0;
        serde_json::from_value(serde_json::json!({
            "device": "a device", "wall_us": 5000.0, "eager_wall_us": null,
            "device_us": is_timed.then_some(3000.0), "gap_us": is_timed.then_some(2000.0),
            "verdict": "unknown", "clock": null, "launch_floor_us": null, "launches": null,
            "untimed_launches": 0.0, "peaks": null,
            "kernels": (0..kernels).map(row).collect::<Vec<_>>(), "blocks": [],
            "chains": { "count": 0.0, "blocks": 0.0, "saved_bytes": 0.0, "device_us": 0.0 },
            "declined": [], "recommendations": [],
        }))
        .expect("a profile")
    }

    fn render(profile: &StepProfile) -> (String, Vec<u8>) {
        let dir = tempfile::tempdir().expect("a folder");
        let (svg, png) = (dir.path().join("bars.svg"), dir.path().join("bars.png"));
        picture::write(&Bars::new(profile), &svg, &png).expect("pictures");
        (fs::read_to_string(svg).expect("an SVG"), fs::read(png).expect("a PNG"))
    }

    #[test]
    fn kernels_and_gaps_have_bars_and_the_rest_is_one() {
        let (svg, png) = render(&profile(20));
        for text in ["kernels and gaps", "3.000 ms and 2.000 ms", "kernel_13&lt;&amp;&gt;"] {
            assert!(svg.contains(text), "{text}");
        }
        assert!(svg.contains("6 other kernels") && !svg.contains("kernel_14"));
        assert!(svg.contains("0.501 ms, 12 x"), "the rest is summed");
        assert!(png.starts_with(b"\x89PNG\r\n\x1a\n"));
        // All bars are on the picture.
        assert!(TOP + ROW * (MOST_KERNELS as i32 + 2) < picture::SIZE.1 as i32);
    }

    #[test]
    fn a_step_without_kernels_is_a_bar_and_says_so() {
        let (svg, _) = render(&profile(0));
        assert!(svg.contains("kernels not timed") && svg.contains("5.000 ms"));
    }
}
