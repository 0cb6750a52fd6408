//! Links of Markdown files to other files of the project. Links to the web are not followed: a
//! check must not depend on other people's servers.

use std::path::Path;

/// What opens a link, and what closes it.
const OPENERS: [(&str, char); 4] =
    [("](", ')'), ("src=\"", '"'), ("href=\"", '"'), ("srcset=\"", '"')];

/// mdBook's directives that name a file. mdBook logs a missing one and renders the page without.
const INCLUDES: [&str; 3] = ["{{#include ", "{{#rustdoc_include ", "{{#playground "];

/// The faults of the Markdown file `path` (relative to the root, as are the paths that `exists`
/// gets).
pub(crate) fn broken(path: &Path, text: &str, exists: &dyn Fn(&Path) -> bool) -> Vec<String> {
    let mut faults = Vec::new();
    let mut fence = None;
    for (number, line) in text.lines().enumerate() {
        let mut targets = included(line);
        let opening = ["```", "~~~"].into_iter().find(|mark| line.trim_start().starts_with(mark));
        match (fence, opening) {
            (None, Some(mark)) => fence = Some(mark),
            (Some(open), Some(mark)) if open == mark => fence = None,
            (None, None) => targets.extend(linked(&without_code(line))),
            _ => {}
        }
        for target in targets.iter().filter(|target| is_local(target)) {
            let file = target.split(['#', '?']).next().unwrap_or_default().replace("%20", " ");
            let file = match file.strip_prefix('/') {
                Some(from_root) => Path::new(from_root).to_path_buf(),
                None => path.parent().unwrap_or(Path::new("")).join(&file),
            };
            if !exists(&file) {
                faults.push(format!(
                    "{}:{}: the link to `{target}` leads nowhere",
                    path.display(),
                    number + 1
                ));
            }
        }
    }
    faults
}

fn is_local(target: &str) -> bool {
    let elsewhere = target.contains("://") || target.starts_with("mailto:");
    !elsewhere && !target.starts_with('#') && !target.is_empty()
}

fn included(line: &str) -> Vec<String> {
    let mut targets = Vec::new();
    for directive in INCLUDES {
        for (at, _) in line.match_indices(directive) {
            // A backslash makes mdBook print the directive itself.
            if !line[..at].ends_with('\\')
                && let Some((argument, _)) = line[at + directive.len()..].split_once("}}")
            {
                // `file:from:to` or `file:anchor`; a playground adds words after the name.
                let file = argument.trim().split([':', ' ']).next().unwrap_or_default();
                targets.push(file.to_owned());
            }
        }
    }
    targets
}

fn linked(line: &str) -> Vec<String> {
    let mut targets = Vec::new();
    for (opener, closer) in OPENERS {
        for (at, _) in line.match_indices(opener) {
            targets.push(first_word(&line[at + opener.len()..], closer));
        }
    }
    // `[name]: target`
    let definition = line.trim_start();
    if definition.starts_with('[')
        && !definition.starts_with("[^")
        && let Some((_, target)) = definition.split_once("]: ")
    {
        targets.push(first_word(target.trim(), ' '));
    }
    targets
}

/// The link's target: up to `closer` or a title, with balanced parentheses, or in angle brackets.
fn first_word(text: &str, closer: char) -> String {
    if let Some((inside, _)) = text.strip_prefix('<').and_then(|rest| rest.split_once('>')) {
        return inside.to_owned();
    }
    let mut depth = 0;
    let end = text.find(|c: char| {
        depth += i32::from(c == '(');
        let ends = c.is_whitespace() || (c == closer && depth == 0);
        depth -= i32::from(c == ')');
        ends
    });
    text[..end.unwrap_or(text.len())].to_owned()
}

/// `line` without its code spans, in which brackets mean something else.
fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(text: &str) -> Vec<String> {
        let present = ["book/src/tuning.md", "book/src/../../README.md", "benches/README.md"];
        broken(Path::new("book/src/intro.md"), text, &|path| {
            present.iter().any(|other| path == Path::new(other))
        })
    }

    #[test]
    fn links_to_files_that_exist_pass() {
        let text = "[a](tuning.md#cache) ![b](../../README.md \"title\") [c](/benches/README.md)\n\
                    [d](<tuning.md>) <img src=\"tuning.md\">\n[e]: tuning.md\n";
        assert_eq!(faults(text), Vec::<String>::new());
    }

    #[test]
    fn a_link_to_a_missing_file_fails_with_its_line() {
        let missing = ["[a](gone.md)", "<a href=\"gone.md\">", "[e]: gone.md", "[a](<gone.md>)"];
        for link in missing {
            let found = faults(&format!("\ntext {link}\n").replace("text [e]", "[e]"));
            assert_eq!(found, ["book/src/intro.md:2: the link to `gone.md` leads nowhere"]);
        }
    }

    #[test]
    fn an_include_of_a_missing_file_fails_even_in_a_code_block() {
        let text = "```rust\n{{#rustdoc_include ../gone.rs:setup}}\n```\n";
        assert_eq!(faults(text).len(), 1);
        assert!(faults("```md\n\\{{#include gone.rs}}\n```\n").is_empty());
    }

    #[test]
    fn the_web_anchors_and_code_are_left_alone() {
        let text = "[a](https://burn.dev) [b](#below) [c](mailto:x@y.z) `v[0](gone.md)`\n\
                    ```rust\nlet f = table[1](gone);\n```\n";
        assert_eq!(faults(text), Vec::<String>::new());
    }

    #[test]
    fn checking_resumes_after_a_code_block() {
        assert_eq!(faults("```\n[a](x.md)\n```\n[a](gone.md)\n").len(), 1);
    }

    #[test]
    fn parentheses_in_a_name_belong_to_it() {
        assert_eq!(first_word("a_(b).md)", ')'), "a_(b).md");
    }
}
