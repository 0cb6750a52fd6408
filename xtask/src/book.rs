//! `cargo xtask book`: the user's guide, from `book/src` to `book/book`.

use crate::{command, tools};
use anyhow::Result;

/// Build the book with mdBook 0.5, which is built first if it is not installed.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Serve it with live reload instead, and open a browser.
    #[arg(long)]
    serve: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let mut mdbook = command::program(tools::mdbook(arguments.serve)?);
    match arguments.serve {
        true => mdbook.args(["serve", "book", "--open"]),
        false => mdbook.args(["build", "book"]),
    };
    command::run(&mut mdbook, "The message above names the chapter or the key of book/book.toml.")?;
    if !arguments.serve {
        println!("book/book/index.html");
    }
    Ok(())
}
