//! What programs print or write, as rows.

mod criterion;
mod gpt;
mod resnet;
mod tables;

use crate::row::Row;
use anyhow::Result;
use std::path::Path;

/// How an output is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Rows of `benches/results` on the standard output.
    Rows,
    /// The table of `matmul_sweep`.
    Matmul,
    /// The table of `torch_matmul.py`.
    TorchMatmul,
    /// The table of `attention_sweep`.
    Attention,
    /// The table of `torch_attention.py`, of which the fastest backend counts.
    TorchAttention,
    /// The columns of `torch_memory.py`.
    Memory,
    /// The sentences of `resnet speed`.
    Resnet,
    /// `metrics.jsonl` in the folder of `gpt train`.
    Gpt,
    /// What criterion estimates, below its folder.
    Criterion,
}

/// What an output held.
#[derive(Debug, Default, PartialEq)]
pub struct Read {
    /// Without date and commit, in the program's order. What failed has a row without numbers.
    pub rows: Vec<Row>,
    /// Lines that are no rows.
    pub strays: usize,
}

impl Format {
    /// Reads what a program left. An output that ends in the middle gives the rows before its end.
    ///
    /// # Errors
    ///
    /// When files that the program writes are missing or broken.
    pub fn read(self, stdout: &str, folder: &Path) -> Result<Read> {
        let rows = match self {
            Self::Rows => return Ok(rows(stdout)),
            Self::Matmul => tables::matmul(stdout),
            Self::TorchMatmul => tables::torch_matmul(stdout),
            Self::Attention => tables::attention(stdout),
            Self::TorchAttention => tables::torch_attention(stdout),
            Self::Memory => tables::memory(stdout),
            Self::Resnet => resnet::read(stdout),
            Self::Gpt => gpt::read(folder)?,
            Self::Criterion => criterion::read(folder)?,
        };
        Ok(Read { rows, strays: 0 })
    }
}

fn rows(stdout: &str) -> Read {
    let mut read = Read::default();
    for line in stdout.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty()) {
        match Row::of_line(line) {
            Ok(row) => read.rows.push(row),
            Err(_) => read.strays += 1,
        }
    }
    read
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_taken_as_they_are_and_other_lines_counted() {
        let row = "-\t-\tsum\tforward\tbf16\t8\tblackburn\t0.01\t0.01\t0.01\t3\tGB/s\tops_sweep; ";
        let cut = "-\t-\tsum\tforward\tbf1";
        let read = rows(&format!("# a comment\n{row}\n\nskipped: no GPU\n{row}\n{cut}"));
        assert_eq!((read.rows.len(), read.strays), (2, 2));
        assert_eq!(read.rows[0].line(), row);
    }
}
