//! Words and punctuation of PTX, each with its line.

/// A piece of a statement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Token<'a> {
    /// A name, a directive, an opcode with its modifiers or a number.
    Word(&'a str),
    /// A text in quotes.
    Text(&'a str),
    /// A single character.
    Mark(char),
}

/// A token and the line that it stands in, from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Placed<'a> {
    pub(super) token: Token<'a>,
    pub(super) line: u32,
}

/// The tokens of a module. Comments are left out, and so are `.loc` and `.file`, which end with
/// their line and tell where the source stood.
pub(super) fn tokens(source: &str) -> Vec<Placed<'_>> {
    let mut tokens = Vec::new();
    let mut in_comment = false;
    for (number, mut rest) in (1..).zip(source.lines()) {
        let first = rest.trim_start();
        if !in_comment && (first.starts_with(".loc") || first.starts_with(".file")) {
            continue;
        }
        loop {
            if in_comment {
                let Some(end) = rest.find("*/") else { break };
                rest = &rest[end + 2..];
                in_comment = false;
            }
            rest = rest.trim_start();
            let Some(first) = rest.chars().next() else { break };
            if rest.starts_with("//") {
                break;
            }
            if rest.starts_with("/*") {
                rest = &rest[2..];
                in_comment = true;
                continue;
            }
            let (token, length) = match first {
                '"' => {
                    let end = rest[1..].find('"').map_or(rest.len(), |end| end + 2);
                    (Token::Text(&rest[..end]), end)
                }
                _ => match word_length(rest) {
                    0 => (Token::Mark(first), first.len_utf8()),
                    length => (Token::Word(&rest[..length]), length),
                },
            };
            tokens.push(Placed { token, line: number });
            rest = &rest[length..];
        }
    }
    tokens
}

/// How much of the text's beginning is one word. Two colons belong to a word, as in
/// `shared::cluster`, one colon ends a label.
fn word_length(text: &str) -> usize {
    let bytes = text.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        match bytes[at] {
            b if b.is_ascii_alphanumeric() || b"_.$%".contains(&b) => at += 1,
            b':' if at > 0 && bytes.get(at + 1) == Some(&b':') => at += 2,
            _ => break,
        }
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_statement_is_cut_into_words_and_marks() {
        let text =
            "WAIT: @!p ld.shared::cta.b32 %r1, [%rd2+-4]; // end\n.loc 1 2 3\n/* a\nb */ ret;";
        let cut = tokens(text);
        let shown: Vec<_> = cut
            .iter()
            .map(|placed| match placed.token {
                Token::Word(word) | Token::Text(word) => word.to_owned(),
                Token::Mark(mark) => mark.to_string(),
            })
            .collect();
        assert_eq!(shown.join(" "), "WAIT : @ ! p ld.shared::cta.b32 %r1 , [ %rd2 + - 4 ] ; ret ;");
        assert_eq!(cut.last().map(|placed| placed.line), Some(4));
    }
}
