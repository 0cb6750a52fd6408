//! Which tap meets which pixel, along one dimension of a tile.

/// One dimension of a tile of pixels and of the taps that they meet. It is known when a kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Line {
    /// Pixels of the tile: of y, or of x for its gradient.
    pub(super) pixels: usize,
    /// Taps of the kernel.
    pub(super) taps: usize,
    /// Pixels of x from one pixel of y to the next.
    pub(super) stride: usize,
    /// Pixels of x from one tap to the next.
    pub(super) dilation: usize,
    /// Whether pixels are those of x, whose taps walk back to y.
    pub(super) is_back: bool,
}

/// A pixel of the tile, a tap, and where they meet: that many pixels from the first one that the tile meets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Term {
    pub(super) pixel: usize,
    pub(super) tap: usize,
    pub(super) source: usize,
}

impl Line {
    /// Where a tap meets a pixel, from where tap 0 meets pixel 0; `None` where no pixel is there.
    fn offset(&self, pixel: usize, tap: usize) -> Option<isize> {
        let (pixel, tap) = (pixel as isize, (tap * self.dilation) as isize);
        let stride = self.stride as isize;
        match self.is_back {
            false => Some(pixel * stride + tap),
            true => {
                let walked = pixel - tap;
                (walked.rem_euclid(stride) == 0).then(|| walked.div_euclid(stride))
            }
        }
    }

    fn offsets(&self) -> impl Iterator<Item = (usize, usize, isize)> {
        let pairs = (0..self.pixels).flat_map(|pixel| (0..self.taps).map(move |tap| (pixel, tap)));
        pairs.filter_map(|(pixel, tap)| Some((pixel, tap, self.offset(pixel, tap)?)))
    }

    /// The first pixel that the tile meets, from where tap 0 meets pixel 0.
    pub(super) fn first(&self) -> isize {
        self.offsets().map(|(_, _, offset)| offset).min().unwrap_or(0)
    }

    /// Pixels from the first to the last that the tile meets.
    pub(super) fn sources(&self) -> usize {
        self.terms().iter().map(|term| term.source + 1).max().unwrap_or(0)
    }

    /// Everything that meets, by pixels and then by taps.
    pub(super) fn terms(&self) -> Vec<Term> {
        let first = self.first();
        let term = |(pixel, tap, offset): (usize, usize, isize)| {
            let source = offset.abs_diff(first);
            Term { pixel, tap, source }
        };
        self.offsets().map(term).collect()
    }

    /// What meets at a place.
    pub(super) fn at_source(&self, source: usize) -> Vec<Term> {
        self.terms().into_iter().filter(|term| term.source == source).collect()
    }

    /// What a tap meets.
    pub(super) fn of_tap(&self, tap: usize) -> Vec<Term> {
        self.terms().into_iter().filter(|term| term.tap == tap).collect()
    }

    /// What a pixel meets.
    pub(super) fn of_pixel(&self, pixel: usize) -> Vec<Term> {
        self.terms().into_iter().filter(|term| term.pixel == pixel).collect()
    }

    /// Pixels of the gathered image from a tile to the next.
    pub(super) fn step(&self) -> usize {
        if self.is_back { self.pixels / self.stride } else { self.pixels * self.stride }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every pair of a pixel of y and a tap that meets a pixel of x, by the definition.
    fn met(size: usize, padding: usize, line: &Line) -> Vec<(usize, usize, usize)> {
        let reach = (line.taps - 1) * line.dilation + 1;
        let outputs = (size + 2 * padding - reach) / line.stride + 1;
        let pairs = (0..outputs).flat_map(|p| (0..line.taps).map(move |r| (p, r)));
        let mut all: Vec<_> = pairs
            .filter_map(|(p, r)| {
                let h = (p * line.stride + r * line.dilation).checked_sub(padding)?;
                (h < size).then_some((p, r, h))
            })
            .collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn tiles_meet_every_pixel_by_every_tap_once_in_both_directions() {
        for (pixels, taps, stride, dilation, padding) in
            [(4, 3, 1, 1, 1), (4, 3, 2, 1, 1), (6, 5, 3, 1, 2), (2, 3, 2, 2, 2), (6, 4, 2, 3, 0)]
        {
            let size = 23;
            let ahead = Line { pixels, taps, stride, dilation, is_back: false };
            let expected = met(size, padding, &ahead);
            let outputs = expected.iter().map(|(p, ..)| p + 1).max().unwrap();
            let mut found = Vec::new();
            for tile in 0..outputs.div_ceil(pixels) {
                for term in ahead.terms() {
                    let first = (tile * ahead.step()) as isize - padding as isize;
                    let (p, h) = (tile * pixels + term.pixel, first + term.source as isize);
                    if p < outputs && (0..size as isize).contains(&h) {
                        found.push((p, term.tap, h as usize));
                    }
                }
            }
            found.sort_unstable();
            assert_eq!(found, expected, "{ahead:?}");

            let back = Line { is_back: true, ..ahead };
            let lead = padding % stride;
            let mut found = Vec::new();
            for tile in 0..(size + lead).div_ceil(pixels) {
                for term in back.terms() {
                    let first = (tile * back.step() + padding / stride) as isize + back.first();
                    let h = (tile * pixels + term.pixel) as isize - lead as isize;
                    let p = first + term.source as isize;
                    if (0..size as isize).contains(&h) && (0..outputs as isize).contains(&p) {
                        found.push((p as usize, term.tap, h as usize));
                    }
                }
            }
            found.sort_unstable();
            assert_eq!(found, expected, "{back:?}");
        }
    }

    #[test]
    fn a_strided_gradient_has_no_known_zeros() {
        // Pixels of two residues in each dimension: 1 and 2 taps of 3.
        let line = Line { pixels: 4, taps: 3, stride: 2, dilation: 1, is_back: true };
        assert_eq!(line.terms().len(), 6);
        assert_eq!((line.first(), line.sources(), line.step()), (-1, 3, 2));
    }
}
