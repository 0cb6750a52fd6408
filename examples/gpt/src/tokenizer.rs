//! Text to tokens and back.
//!
//! | kind | vocabulary | document end | use |
//! |---|---|---|---|
//! | `bytes` | 256 | 0 | tiny models and smoke tests; every byte is a token |
//! | `gpt2` | 50257 | 50256 | GPT-2's byte-pair encoding, the ranks are embedded in the binary |
//!
//! Both vocabularies fit `u16`, which halves the token store compared with `u32`.

use serde::{Deserialize, Serialize};
use tiktoken::CoreBpe;

const GPT2_VOCAB_SIZE: usize = 50_257;
const GPT2_END_OF_DOCUMENT: u16 = 50_256;
/// `store` skips files that hold a NUL byte as binary, so 0 is free to separate documents.
const BYTES_END_OF_DOCUMENT: u16 = 0;
/// Occurs nowhere in valid UTF-8, so lossy decoding shows it as U+FFFD.
const INVALID_UTF8: u8 = 0xff;

/// The choice of tokenizer, as it appears on the command line and in manifests.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum TokenizerKind {
    /// Every byte is a token: 256 of them.
    Bytes,
    /// GPT-2's byte-pair encoding: 50257 tokens.
    Gpt2,
}

impl TokenizerKind {
    /// The name on the command line, in manifests and in file names.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Bytes => "bytes",
            Self::Gpt2 => "gpt2",
        }
    }
}

/// Encodes and decodes text. Cheap to copy: the GPT-2 ranks are a process-wide table.
#[derive(Clone, Copy)]
pub(crate) struct Tokenizer {
    engine: Engine,
}

#[derive(Clone, Copy)]
enum Engine {
    Bytes,
    Gpt2(&'static CoreBpe),
}

impl Tokenizer {
    /// The tokenizer of that kind. The first GPT-2 one decompresses the ranks, a fraction of a
    /// second.
    pub(crate) fn new(kind: TokenizerKind) -> Self {
        let engine = match kind {
            TokenizerKind::Bytes => Engine::Bytes,
            // GPT-2 and the first GPT-3 share ranks, pattern and special token; every release of
            // the crate knows them under this name, only later ones under "gpt2" as well.
            TokenizerKind::Gpt2 => Engine::Gpt2(
                tiktoken::get_encoding("r50k_base").expect("tiktoken embeds the r50k_base ranks"),
            ),
        };
        Self { engine }
    }

    /// Which tokenizer this is.
    pub(crate) fn kind(&self) -> TokenizerKind {
        match self.engine {
            Engine::Bytes => TokenizerKind::Bytes,
            Engine::Gpt2(_) => TokenizerKind::Gpt2,
        }
    }

    /// Number of token ids, the document end included.
    pub(crate) fn vocab_size(&self) -> usize {
        match self.engine {
            Engine::Bytes => 256,
            Engine::Gpt2(_) => GPT2_VOCAB_SIZE,
        }
    }

    /// The token that separates documents.
    pub(crate) fn end_of_document(&self) -> u16 {
        match self.engine {
            Engine::Bytes => BYTES_END_OF_DOCUMENT,
            Engine::Gpt2(_) => GPT2_END_OF_DOCUMENT,
        }
    }

    /// Tokens of `text`. A literal `<|endoftext|>` is ordinary text: source files quote it, and
    /// only the store decides where documents end.
    pub(crate) fn encode(&self, text: &str) -> Vec<u16> {
        match self.engine {
            Engine::Bytes => text.bytes().map(u16::from).collect(),
            Engine::Gpt2(ranks) => ranks
                .encode(text)
                .into_iter()
                .map(|token| u16::try_from(token).expect("GPT-2 tokens are below 50257"))
                .collect(),
        }
    }

    /// Text of `tokens`. Bytes that are not UTF-8 (a model may emit half a character) and ids
    /// outside the vocabulary (a model may pad its output layer) become U+FFFD.
    pub(crate) fn decode(&self, tokens: &[u16]) -> String {
        let mut bytes = Vec::with_capacity(tokens.len() * 4);
        for &token in tokens {
            match self.engine {
                Engine::Bytes => bytes.push(u8::try_from(token).unwrap_or(INVALID_UTF8)),
                Engine::Gpt2(_) if usize::from(token) >= GPT2_VOCAB_SIZE => {
                    bytes.push(INVALID_UTF8);
                }
                Engine::Gpt2(ranks) => bytes.extend(ranks.decode(&[u32::from(token)])),
            }
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// Cuts `text` into pieces of about `target_bytes` that encode, one after the other, to exactly
/// the tokens of the whole: a large file needs memory for the tokens of one piece only.
///
/// A cut lies between a visible character and white space. No alternative of GPT-2's pattern
/// reaches across that place (a word may start with a space, none ends with one), so it is a
/// boundary of the whole text as well. Text without such a place stays in one piece.
pub(crate) fn pieces(text: &str, target_bytes: usize) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let (piece, tail) = rest.split_at(first_cut(rest, target_bytes));
        rest = tail;
        Some(piece)
    })
}

fn first_cut(text: &str, target_bytes: usize) -> usize {
    if text.len() <= target_bytes {
        return text.len();
    }
    let from = text.floor_char_boundary(target_bytes);
    let mut after_visible = false;
    for (offset, character) in text[from..].char_indices() {
        let space = character.is_whitespace();
        if space && after_visible {
            return from + offset;
        }
        after_visible = !space;
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;

    const SAMPLE: &str = "fn main() {\n    println!(\"h\u{e9}llo \u{4f60}\u{597d} \u{1f680}\");\n}\n\n\t// it's 42\u{3000}\u{3000}x \n";

    #[test]
    fn decoding_what_was_encoded_gives_the_text_back() {
        for kind in [TokenizerKind::Bytes, TokenizerKind::Gpt2] {
            let tokenizer = Tokenizer::new(kind);
            assert_eq!(tokenizer.decode(&tokenizer.encode(SAMPLE)), SAMPLE);
            assert_eq!(tokenizer.encode(""), Vec::<u16>::new());
            assert_eq!(tokenizer.kind(), kind);
        }
    }

    #[test]
    fn gpt2_tokens_are_those_that_gpt2_was_trained_with() {
        let tokenizer = Tokenizer::new(TokenizerKind::Gpt2);
        assert_eq!(tokenizer.encode("Hello world"), [15496, 995]);
        assert_eq!(tokenizer.encode("  two"), [220, 734]);
        assert_eq!(tokenizer.vocab_size(), 50_257);
        assert_eq!(tokenizer.end_of_document(), 50_256);
    }

    #[test]
    fn every_gpt2_id_decodes_and_the_last_is_the_document_end() {
        let Engine::Gpt2(ranks) = Tokenizer::new(TokenizerKind::Gpt2).engine else {
            panic!("a GPT-2 tokenizer holds ranks");
        };
        assert_eq!(ranks.vocab_size() + ranks.num_special_tokens(), GPT2_VOCAB_SIZE);
        for token in 0..GPT2_VOCAB_SIZE {
            let token = u32::try_from(token).expect("small");
            assert!(!ranks.decode(&[token]).is_empty(), "token {token} decodes to nothing");
        }
        let end = ranks.decode(&[u32::from(GPT2_END_OF_DOCUMENT)]);
        assert_eq!(end, b"<|endoftext|>");
    }

    #[test]
    fn a_literal_end_of_text_marker_is_not_the_special_token() {
        let text = "before <|endoftext|> after<|endoftext|>";
        for kind in [TokenizerKind::Bytes, TokenizerKind::Gpt2] {
            let tokenizer = Tokenizer::new(kind);
            let tokens = tokenizer.encode(text);
            assert!(!tokens.contains(&tokenizer.end_of_document()));
            assert_eq!(tokenizer.decode(&tokens), text);
        }
    }

    #[test]
    fn broken_characters_and_foreign_ids_decode_to_the_replacement_character() {
        let bytes = Tokenizer::new(TokenizerKind::Bytes);
        assert_eq!(bytes.decode(&[b'a'.into(), 0xe4, 300, b'b'.into()]), "a\u{fffd}\u{fffd}b");
        let gpt2 = Tokenizer::new(TokenizerKind::Gpt2);
        let rocket = gpt2.encode("\u{1f680}");
        assert!(rocket.len() > 1, "the test needs a character of several tokens");
        assert!(gpt2.decode(&rocket[..1]).contains('\u{fffd}'));
        assert_eq!(gpt2.decode(&[15496, 50_300]), "Hello\u{fffd}");
    }

    #[test]
    fn pieces_encode_to_the_tokens_of_the_whole_text() {
        let text = SAMPLE.repeat(5);
        for kind in [TokenizerKind::Bytes, TokenizerKind::Gpt2] {
            let tokenizer = Tokenizer::new(kind);
            let whole = tokenizer.encode(&text);
            for target in 0..text.len() + 1 {
                let cut: Vec<u16> =
                    pieces(&text, target).flat_map(|piece| tokenizer.encode(piece)).collect();
                assert_eq!(cut, whole, "pieces of {target} bytes");
            }
        }
        assert_eq!(pieces("", 4).count(), 0);
        assert_eq!(pieces("nowhitespace", 4).count(), 1);
        assert_eq!(pieces("aa bb cc", 1).collect::<Vec<_>>(), ["aa", " bb", " cc"]);
    }

    #[test]
    fn names_on_the_command_line_equal_names_in_manifests() {
        for kind in TokenizerKind::value_variants() {
            let cli = kind.to_possible_value().expect("no kind is hidden");
            let json = serde_json::to_string(kind).expect("a plain enum serializes");
            assert_eq!(cli.get_name(), kind.name());
            assert_eq!(json, format!("\"{}\"", kind.name()));
        }
    }
}
