//! Tensors as they lie in memory: apart, displaced, transposed, shared.

use crate::{buffers::upload_behind, draw::Draw, target::Target};
use blackburn_kernels::buffer::Buffer;
use blackburn_reference::storage::Storage;

/// A tensor's shape and strides, in elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) shape: Vec<usize>,
    pub(crate) strides: Vec<usize>,
}

impl Layout {
    /// The dimensions in memory from the outermost to the innermost are those in `order`; `padding` elements
    /// lie behind each run of the innermost dimension.
    pub(crate) fn ordered(shape: &[usize], order: &[usize], padding: usize) -> Self {
        let mut strides = vec![0; shape.len()];
        let mut step = 1;
        for (place, dim) in order.iter().rev().enumerate() {
            strides[*dim] = step;
            step *= shape[*dim];
            if place == 0 {
                step += padding;
            }
        }
        Self { shape: shape.to_vec(), strides }
    }

    /// Rows apart.
    pub(crate) fn rows(rows: usize, columns: usize, stride: usize) -> Self {
        Self { shape: vec![rows, columns], strides: vec![stride, 1] }
    }

    /// Elements from the first to the last.
    pub(crate) fn span(&self) -> usize {
        if self.shape.contains(&0) {
            return 0;
        }
        let last = |(size, stride): (&usize, &usize)| (size - 1) * stride;
        self.shape.iter().zip(&self.strides).map(last).sum::<usize>() + 1
    }

    /// Where the elements lie, in the order of their indices.
    fn places(&self) -> impl Iterator<Item = usize> + '_ {
        let count: usize = self.shape.iter().product();
        (0..count).map(move |element| {
            let mut rest = element;
            let mut place = 0;
            for (size, stride) in self.shape.iter().zip(&self.strides).rev() {
                place += rest % size * stride;
                rest /= size;
            }
            place
        })
    }

    /// Memory that holds `values`, NaN between them and in `behind` elements behind the last.
    pub(crate) fn scatter(&self, values: &[f64], behind: usize) -> Vec<f64> {
        let mut memory = vec![f64::NAN; self.span() + behind];
        self.put(values, &mut memory);
        memory
    }

    /// Puts `values` into such memory, and leaves the rest of it.
    pub(crate) fn put(&self, values: &[f64], memory: &mut [f64]) {
        for (place, value) in self.places().zip(values) {
            memory[place] = *value;
        }
    }

    /// The values in such memory.
    pub(crate) fn gather(&self, memory: &[f64]) -> Vec<f64> {
        self.places().map(|place| memory[place]).collect()
    }
}

/// `values` on the device, in that layout, at a drawn place of their memory.
pub(crate) fn place(
    on: &Target,
    draw: &mut Draw,
    name: &str,
    (values, layout): (&[f64], &Layout),
    storage: Storage,
) -> Buffer {
    let front = draw.one_of(&format!("{name}-front"), on.offsets());
    let behind = draw.one_of(&format!("{name}-behind"), &[0, 0, 16]);
    upload_behind(&on.client, front, &layout.scatter(values, behind), storage)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transposed_matrix_with_padding_lies_column_by_column() {
        let layout = Layout::ordered(&[2, 3], &[1, 0], 1);
        assert_eq!((layout.strides.as_slice(), layout.span()), (&[1, 3][..], 8));
        let values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let memory = layout.scatter(&values, 1);
        assert_eq!(memory.len(), 9);
        assert_eq!((memory[0], memory[1], memory[3]), (1.0, 4.0, 2.0));
        assert!(memory[2].is_nan() && memory[8].is_nan());
        assert_eq!(layout.gather(&memory), values);
    }

    #[test]
    fn empty_tensors_span_nothing() {
        let layout = Layout::ordered(&[0, 3], &[0, 1], 2);
        assert_eq!((layout.span(), layout.scatter(&[], 0).len()), (0, 0));
    }
}
