use std::path::PathBuf;

use tempfile::TempDir;

use super::*;
use crate::corpus::{CorpusOptions, discover};

fn folder(files: &[(&str, &[u8])]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, content) in files {
        fs::write(folder.path().join(name), content).unwrap();
    }
    folder
}

fn four_texts() -> TempDir {
    folder(&[("a", b"one"), ("b", b"two 2"), ("c", b"3"), ("d", b"four")])
}

fn corpus(folder: &TempDir) -> Corpus {
    let options = CorpusOptions {
        paths: vec![folder.path().to_path_buf()],
        extensions: vec![],
        max_bytes: None,
        validation_fraction: 0.25,
        seed: 0,
    };
    discover(&options).unwrap()
}

fn open(cache: &TempDir, corpus: &Corpus, kind: TokenizerKind) -> Result<TokenStore> {
    open_or_build(cache.path(), corpus, kind, true)
}

fn open_bytes(cache: &TempDir, corpus: &Corpus) -> TokenStore {
    open(cache, corpus, TokenizerKind::Bytes).unwrap()
}

fn stores(cache: &TempDir) -> Vec<PathBuf> {
    let entries = fs::read_dir(cache.path()).unwrap();
    entries.map(|entry| entry.unwrap().path()).collect()
}

/// Under a new inode: the old one may be mapped.
fn replace(path: &Path, content: &[u8]) {
    fs::remove_file(path).unwrap();
    fs::write(path, content).unwrap();
}

#[test]
fn each_side_holds_its_documents_in_order_with_an_end_after_each() {
    let (texts, cache) = (four_texts(), tempfile::tempdir().unwrap());
    let corpus = corpus(&texts);
    for kind in [TokenizerKind::Bytes, TokenizerKind::Gpt2] {
        let store = open(&cache, &corpus, kind).unwrap();
        let tokenizer = Tokenizer::new(kind);
        for (side, tokens) in [(false, store.train()), (true, store.validation())] {
            let mut expected = Vec::new();
            for file in corpus.files.iter().filter(|file| file.validation == side) {
                expected.extend(tokenizer.encode(&fs::read_to_string(&file.path).unwrap()));
                expected.push(tokenizer.end_of_document());
            }
            assert!(!expected.is_empty());
            assert_eq!(tokens, expected);
        }
        let manifest = store.manifest();
        assert_eq!((manifest.files_used, manifest.bytes), (4, 13));
        assert_eq!(manifest.train_tokens, store.train().len() as u64);
    }
    assert_eq!(stores(&cache).len(), 2, "one a tokenizer, no other file");
}

#[test]
fn a_single_file_is_split_by_the_position_of_its_tokens() {
    let cache = tempfile::tempdir().unwrap();
    let store = open_bytes(&cache, &corpus(&folder(&[("a", b"0123456789")])));
    let train: Vec<u16> = b"01234567".iter().map(|&byte| byte.into()).collect();
    assert_eq!(store.train(), train);
    // Eleven tokens with the document's end; a quarter, rounded up.
    assert_eq!(store.validation(), [b'8'.into(), b'9'.into(), 0]);
    let store = open_bytes(&cache, &corpus(&folder(&[("a", b"x")])));
    assert_eq!(store.tokens(), [b'x'.into(), 0]);
    assert_eq!(store.validation(), [0]);
}

#[test]
fn a_large_file_is_encoded_piece_by_piece_without_a_seam() {
    let text = "let value = 1;\n    ".repeat(PIECE_BYTES / 8);
    let texts = folder(&[("a", text.as_bytes())]);
    let cache = tempfile::tempdir().unwrap();
    let store = open(&cache, &corpus(&texts), TokenizerKind::Gpt2).unwrap();
    let tokenizer = Tokenizer::new(TokenizerKind::Gpt2);
    let mut tokens = tokenizer.encode(&text);
    tokens.push(tokenizer.end_of_document());
    assert!(store.tokens() == tokens, "the tokens differ from the whole text's");
}

#[test]
fn files_that_are_not_text_or_unreadable_are_left_out_and_counted() {
    let (text, nul, latin1) = (&b"text"[..], &b"te\0xt"[..], &b"caf\xe9"[..]);
    let files = [("a", text), ("b", text), ("nul", nul), ("latin1", latin1), ("gone", text)];
    let texts = folder(&files);
    let mut corpus = corpus(&texts);
    for file in &mut corpus.files {
        file.validation = file.path.ends_with("a");
    }
    fs::remove_file(texts.path().join("gone")).unwrap();
    let store = open_bytes(&tempfile::tempdir().unwrap(), &corpus);
    let manifest = store.manifest();
    assert_eq!((manifest.files_used, manifest.bytes), (2, 8));
    assert_eq!((manifest.files_not_text, manifest.files_unreadable), (2, 1));
    assert_eq!((store.train().len(), store.validation().len()), (5, 5));
    assert!(manifest.to_string().contains("left out 2 files"));
}

#[test]
fn a_side_without_text_is_an_error_and_leaves_no_file() {
    let texts = folder(&[("a", b"text"), ("b", b"\0"), ("c", b"\xff")]);
    let mut corpus = corpus(&texts);
    for (text_held_out, side) in [(true, "training"), (false, "validation")] {
        for file in &mut corpus.files {
            file.validation = file.path.ends_with("a") == text_held_out;
        }
        let cache = tempfile::tempdir().unwrap();
        let error = open(&cache, &corpus, TokenizerKind::Bytes).unwrap_err();
        let expected = format!("none for {side}: of 3 files 1 are UTF-8 text, 2 are not");
        assert!(error.to_string().contains(&expected), "{error}");
        assert!(stores(&cache).is_empty());
    }
}

#[test]
fn an_equal_corpus_reuses_the_store_and_a_changed_one_does_not() {
    let (texts, cache) = (four_texts(), tempfile::tempdir().unwrap());
    let first = open_bytes(&cache, &corpus(&texts));
    let path = &stores(&cache)[0];
    assert!(path.to_string_lossy().contains(first.fingerprint()));
    // A mark that a new build would not have.
    let mut content = fs::read(path).unwrap();
    content[HEADER_BYTES] = b'#';
    replace(path, &content);
    let second = open_bytes(&cache, &corpus(&texts));
    assert_eq!(second.train()[0], u16::from(b'#'));

    fs::write(texts.path().join("a"), "longer").unwrap();
    let third = open_bytes(&cache, &corpus(&texts));
    assert_ne!(third.fingerprint(), first.fingerprint());
    assert_eq!(stores(&cache).len(), 2);
}

#[test]
fn the_fingerprint_depends_on_tokenizer_split_and_every_field_of_the_files() {
    let corpus = corpus(&four_texts());
    let of = |change: fn(&mut Corpus)| {
        let mut changed = corpus.clone();
        change(&mut changed);
        fingerprint(&changed, TokenizerKind::Bytes)
    };
    let all = [
        of(|_| ()),
        fingerprint(&corpus, TokenizerKind::Gpt2),
        of(|corpus| corpus.split = Split::ByPosition { fraction: 0.5 }),
        of(|corpus| corpus.split = Split::ByPosition { fraction: 0.25 }),
        of(|corpus| corpus.files[0].path.push("x")),
        of(|corpus| corpus.files[0].bytes += 1),
        of(|corpus| corpus.files[0].modified_ns += 1),
        of(|corpus| corpus.files[0].validation ^= true),
        of(|corpus| corpus.files.swap(0, 1)),
        of(|corpus| corpus.files.truncate(3)),
    ];
    assert_eq!(std::collections::BTreeSet::from(all).len(), 10);
}

#[test]
fn a_damaged_store_is_built_again() {
    let (texts, cache) = (four_texts(), tempfile::tempdir().unwrap());
    let corpus = corpus(&texts);
    drop(open_bytes(&cache, &corpus));
    let path = stores(&cache).remove(0);
    let good = fs::read(&path).unwrap();
    let damages: [fn(&mut Vec<u8>); 9] = [
        |empty| empty.clear(),
        |half_a_header| half_a_header.truncate(HEADER_BYTES / 2),
        |a_token_short| a_token_short.truncate(a_token_short.len() - 2),
        |a_token_more| a_token_more.extend([0; 2]),
        |half_a_token_more| half_a_token_more.push(0),
        |magic| magic[0] ^= 1,
        |version| version[8] ^= 1,
        |length_of_manifest| length_of_manifest[12..16].fill(0xff),
        |manifest| manifest[PREFIX_BYTES] = b'[',
    ];
    for (case, damage) in damages.into_iter().enumerate() {
        let mut content = good.clone();
        damage(&mut content);
        replace(&path, &content);
        assert_eq!(open_bytes(&cache, &corpus).tokens().len(), 17, "{case}");
        assert_eq!(fs::read(&path).unwrap(), good, "{case}");
    }
    let other = TokenStore::open(&path, "another", TokenizerKind::Bytes).unwrap_err();
    assert!(other.to_string().contains("another"), "{other}");
}
