//! What a network takes for what.

use super::{BLUE, Drawing, FONT, ORANGE, TEXT, shortened};
use crate::evaluation::Evaluation;
use anyhow::{Context, Result};
use plotters::{
    coord::Shift,
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

/// Classes that are shown; of more, those that are mistaken most often.
const MOST: usize = 40;
/// Where the matrix begins, and the size of the cells of few classes and of many.
const LEFT: i32 = 270;
const TOP: i32 = 100;
const CELLS: [i32; 2] = [20, 44];
/// Letters of a class's name.
const NAME: usize = 30;

/// A matrix of shares: a row for each class, a column for what its images were taken for.
pub(crate) struct Confusion {
    title: String,
    names: Vec<String>,
    counts: Vec<Vec<u32>>,
    /// Of each class, also in columns that are not shown.
    totals: Vec<u32>,
}

impl Confusion {
    pub(crate) fn new(evaluation: &Evaluation, classes: &[String]) -> Self {
        let all = classes.len();
        let row = |class: usize| &evaluation.confusion[class * all..][..all];
        let total = |class: usize| row(class).iter().sum::<u32>();
        let mut shown: Vec<usize> = (0..all).collect();
        shown.sort_by_key(|class| std::cmp::Reverse(total(*class) - row(*class)[*class]));
        shown.truncate(MOST);
        shown.sort_unstable();
        let of_all = match all > MOST {
            true => format!(" ({MOST} of {all} classes, those mistaken most often)"),
            false => String::new(),
        };
        let title = format!(
            "{:.1} % of {} images told right{of_all}",
            100.0 * evaluation.top1(),
            evaluation.images()
        );
        Self {
            title,
            names: shown.iter().map(|class| classes[*class].clone()).collect(),
            counts: shown
                .iter()
                .map(|class| shown.iter().map(|column| row(*class)[*column]).collect())
                .collect(),
            totals: shown.iter().map(|class| total(*class)).collect(),
        }
    }

    fn cell(&self) -> i32 {
        if self.names.len() > 20 { CELLS[0] } else { CELLS[1] }
    }

    fn end(&self) -> (i32, i32) {
        let length = self.cell() * self.names.len() as i32;
        (LEFT + length, TOP + length)
    }
}

impl Drawing for Confusion {
    fn size(&self) -> (u32, u32) {
        let (right, bottom) = self.end();
        // Room for the title above, and for the names of columns, which are turned, below.
        ((right + 40).max(LEFT + 500) as u32, (bottom + LEFT) as u32)
    }

    fn draw<B>(&self, area: &DrawingArea<B, Shift>) -> Result<()>
    where
        B: DrawingBackend,
        B::ErrorType: 'static,
    {
        let cell = self.cell();
        let text = |size: i32, position: Pos| (FONT, size).into_font().color(&TEXT).pos(position);
        let title = Pos::new(HPos::Left, VPos::Center);
        area.fill(&WHITE)?;
        area.draw(&Text::new(self.title.clone(), (20, 30), text(22, title)))?;
        let note =
            "rows: what an image is; columns: what it was taken for; shares of a row in percent";
        area.draw(&Text::new(note, (20, 64), text(14, title)))?;
        let letters = (cell - 6).min(16);
        for (row, name) in self.names.iter().enumerate() {
            let name = shortened(name, NAME);
            let offset = cell * row as i32 + cell / 2;
            let position = Pos::new(HPos::Right, VPos::Center);
            area.draw(&Text::new(name.clone(), (LEFT - 8, TOP + offset), text(letters, position)))?;
            let turned = (FONT, letters).into_font().transform(FontTransform::Rotate90);
            let turned = turned.color(&TEXT).pos(Pos::new(HPos::Left, VPos::Center));
            area.draw(&Text::new(name, (LEFT + offset, self.end().1 + 8), turned))?;
        }
        for (row, counts) in self.counts.iter().enumerate() {
            for (column, count) in counts.iter().enumerate() {
                let share = f64::from(*count) / f64::from(self.totals[row].max(1));
                let hue = if row == column { BLUE } else { ORANGE };
                let (x, y) = (LEFT + cell * column as i32, TOP + cell * row as i32);
                let corners = [(x, y), (x + cell - 1, y + cell - 1)];
                area.draw(&Rectangle::new(corners, tint(hue, share).filled()))?;
                if *count > 0 && cell == CELLS[1] {
                    let color = if share > 0.5 { WHITE } else { TEXT };
                    let font = (FONT, 14).into_font().color(&color);
                    let font = font.pos(Pos::new(HPos::Center, VPos::Center));
                    let percent = format!("{:.0}", 100.0 * share);
                    area.draw(&Text::new(percent, (x + cell / 2, y + cell / 2), font))?;
                }
            }
        }
        area.present().context("writing the picture")
    }
}

/// From almost white to the color. A small share is to be seen.
fn tint(color: RGBColor, share: f64) -> RGBColor {
    let strength = if share > 0.0 { 0.1 + 0.9 * share } else { 0.03 };
    let mix = |value: u8| (255.0 - strength * (255.0 - f64::from(value))).round() as u8;
    RGBColor(mix(color.0), mix(color.1), mix(color.2))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pictures::tests::drawn;

    fn evaluation(classes: usize) -> (Evaluation, Vec<String>) {
        let names: Vec<String> = (0..classes).map(|class| format!("class <{class}>")).collect();
        let mut evaluation = Evaluation::of(classes);
        for class in 0..classes {
            evaluation.confusion[class * classes + class] = 3;
            // The later ones are mistaken more often.
            evaluation.confusion[class * classes] += class as u32;
        }
        (evaluation, names)
    }

    #[test]
    fn rows_are_shares_and_names_are_on_both_sides() {
        let (evaluation, names) = evaluation(3);
        let (svg, size) = drawn(&Confusion::new(&evaluation, &names));
        assert_eq!(svg.matches("class &lt;2&gt;").count(), 2);
        // Of five images of the last class three are right.
        assert!(svg.contains(">\n60\n<") || svg.contains(">60<"), "{svg}");
        assert!(svg.contains("75.0 % of 12 images"), "{svg}");
        assert!(size.0 > 500 && size.1 > 300);
    }

    #[test]
    fn of_many_classes_those_are_shown_that_are_mistaken_most_often() {
        let (evaluation, names) = evaluation(100);
        let confusion = Confusion::new(&evaluation, &names);
        assert_eq!((confusion.names.len(), &confusion.names[0]), (40, &names[60]));
        let (svg, _) = drawn(&confusion);
        assert!(svg.contains("40 of 100 classes"));
    }
}
