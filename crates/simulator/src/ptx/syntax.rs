//! Statements as they are written, before names mean anything.

use super::lexer::{Placed, Token, tokens};
use crate::error::ParseError;

/// An operand as it is written.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Written {
    /// A register, a symbol, a label, a number or `_`.
    Word(String),
    /// A number behind a minus.
    Negative(String),
    /// `!p`.
    Not(String),
    /// `p|q`: two results.
    Pair(String, String),
    /// `{a, b}`.
    List(Vec<Written>),
    /// `[base + offset, coordinates]`.
    Address { base: String, offset: i64, coordinates: Vec<Written> },
}

/// An instruction as it is written.
#[derive(Clone, Debug)]
pub(super) struct Statement {
    pub(super) line: u32,
    /// Whether the guard is negated, and its predicate.
    pub(super) guard: Option<(bool, String)>,
    pub(super) opcode: String,
    pub(super) operands: Vec<Written>,
}

/// A variable of a module or of a kernel.
#[derive(Clone, Debug)]
pub(super) struct Variable {
    pub(super) line: u32,
    pub(super) space: String,
    pub(super) align: u64,
    pub(super) name: String,
    /// Bytes of an element.
    pub(super) element: u64,
    /// Elements; `None` for an array whose size the launch gives.
    pub(super) count: Option<u64>,
    pub(super) values: Vec<u64>,
}

/// What stands in a kernel's body.
#[derive(Clone, Debug)]
pub(super) enum Item {
    Open,
    Close,
    Label(String),
    /// Type, name, and how many are declared at once.
    Registers(u32, String, String, Option<u32>),
    Variable(Variable),
    Statement(Statement),
}

/// A kernel as it is written.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) line: u32,
    pub(super) name: String,
    pub(super) parameters: Vec<Variable>,
    /// Blocks of a cluster along x, y, z.
    pub(super) cluster: [u32; 3],
    pub(super) items: Vec<Item>,
}

/// A module as it is written.
#[derive(Clone, Debug, Default)]
pub(super) struct Source {
    pub(super) target: String,
    pub(super) variables: Vec<Variable>,
    pub(super) entries: Vec<Entry>,
}

type Parsed<T> = Result<T, ParseError>;

/// Reads a module.
pub(super) fn read(text: &str) -> Parsed<Source> {
    let tokens = tokens(text);
    Reader { tokens: &tokens, at: 0 }.module()
}

struct Reader<'a> {
    tokens: &'a [Placed<'a>],
    at: usize,
}

impl<'a> Reader<'a> {
    fn module(&mut self) -> Parsed<Source> {
        let mut source = Source::default();
        while let Some(token) = self.peek() {
            match token {
                Token::Word(".version" | ".address_size") => self.skip(2),
                Token::Word(".target") => {
                    self.at += 1;
                    source.target = self.word()?.to_owned();
                    while self.take(',') {
                        self.at += 1;
                    }
                }
                Token::Word(".section") => self.skip_block()?,
                Token::Word(".visible" | ".extern" | ".weak") => self.at += 1,
                Token::Word(".entry") => source.entries.push(self.entry()?),
                Token::Word(".global" | ".const" | ".shared") => {
                    source.variables.push(self.variable()?);
                }
                Token::Word(".func") => return Err(self.error("functions are not supported")),
                Token::Mark(';') => self.at += 1,
                _ => return Err(self.error("expected a directive of a module")),
            }
        }
        Ok(source)
    }

    fn entry(&mut self) -> Parsed<Entry> {
        let line = self.line();
        self.at += 1;
        let name = self.word()?.to_owned();
        let mut parameters = Vec::new();
        if self.take('(') {
            while !self.take(')') {
                parameters.push(self.variable()?);
                self.take(',');
            }
        }
        let mut cluster = [1; 3];
        while !self.take('{') {
            // What the kernel says of its launches: `.maxntid 256`.
            match self.peek() {
                None => return Err(self.error("the kernel has no body")),
                Some(Token::Word(".reqnctapercluster")) => {
                    self.at += 1;
                    for (place, blocks) in cluster.iter_mut().enumerate() {
                        if place == 0 || self.take(',') {
                            *blocks = self.number()? as u32;
                        }
                    }
                }
                Some(_) => self.at += 1,
            }
        }
        let mut items = Vec::new();
        let mut depth = 1;
        loop {
            match self.peek() {
                None => return Err(self.error("the kernel has no end")),
                Some(Token::Mark('{')) => {
                    self.at += 1;
                    depth += 1;
                    items.push(Item::Open);
                }
                Some(Token::Mark('}')) => {
                    self.at += 1;
                    depth -= 1;
                    if depth == 0 {
                        return Ok(Entry { line, name, parameters, cluster, items });
                    }
                    items.push(Item::Close);
                }
                Some(Token::Mark(';')) => self.at += 1,
                Some(Token::Word(".pragma")) => self.skip(2),
                Some(Token::Word(".reg")) => self.registers(&mut items)?,
                Some(Token::Word(".shared" | ".local")) => {
                    items.push(Item::Variable(self.variable()?));
                }
                Some(_) => {
                    let item = self.statement()?;
                    items.push(item);
                }
            }
        }
    }

    fn registers(&mut self, items: &mut Vec<Item>) -> Parsed<()> {
        let line = self.line();
        self.at += 1;
        let ty = self.word()?.to_owned();
        loop {
            let name = self.word()?.to_owned();
            let count = if self.take('<') {
                let count = self.number()? as u32;
                self.expect('>')?;
                Some(count)
            } else {
                None
            };
            items.push(Item::Registers(line, ty.clone(), name, count));
            if !self.take(',') {
                return self.expect(';');
            }
        }
    }

    /// `.shared .align 16 .b8 name[64] = {1, 2};`, or a parameter without its semicolon.
    fn variable(&mut self) -> Parsed<Variable> {
        let line = self.line();
        let space = self.word()?.to_owned();
        let mut align = 1;
        let element = loop {
            match self.word()? {
                ".align" => align = self.number()?,
                ".ptr" | ".global" | ".const" | ".shared" | ".local" => {}
                ty => match bytes_of(ty) {
                    Some(bytes) => {
                        // `.ptr .align 4` is a promise about what a parameter points to.
                        if space == ".param" {
                            align = align.max(bytes);
                        }
                        if matches!(self.peek(), Some(Token::Word(".ptr"))) {
                            while matches!(self.peek(), Some(Token::Word(w)) if w.starts_with('.') || w.as_bytes()[0].is_ascii_digit())
                            {
                                self.at += 1;
                            }
                        }
                        break bytes;
                    }
                    None => return Err(self.error(&format!("unknown type `{ty}`"))),
                },
            }
        };
        let align = align.max(element);
        let name = self.word()?.to_owned();
        let mut count = Some(1);
        if self.take('[') {
            if self.take(']') {
                count = None;
            } else {
                count = Some(self.number()?);
                self.expect(']')?;
            }
        }
        let mut values = Vec::new();
        if self.take('=') {
            let block = self.take('{');
            loop {
                values.push(self.number()?);
                if !self.take(',') {
                    break;
                }
            }
            if block {
                self.expect('}')?;
            }
        }
        Ok(Variable { line, space, align, name, element, count, values })
    }

    fn statement(&mut self) -> Parsed<Item> {
        let line = self.line();
        let mut guard = None;
        if self.take('@') {
            let negated = self.take('!');
            guard = Some((negated, self.word()?.to_owned()));
        }
        let opcode = self.word()?.to_owned();
        if guard.is_none() && self.take(':') {
            return Ok(Item::Label(opcode));
        }
        let mut operands = Vec::new();
        while !self.take(';') {
            operands.push(self.operand()?);
            if !self.take(',') {
                self.expect(';')?;
                break;
            }
        }
        Ok(Item::Statement(Statement { line, guard, opcode, operands }))
    }

    fn operand(&mut self) -> Parsed<Written> {
        if self.take('-') {
            return Ok(Written::Negative(self.word()?.to_owned()));
        }
        if self.take('!') {
            return Ok(Written::Not(self.word()?.to_owned()));
        }
        if self.take('{') {
            let mut list = Vec::new();
            while !self.take('}') {
                list.push(self.operand()?);
                self.take(',');
            }
            return Ok(Written::List(list));
        }
        if self.take('[') {
            let base = self.word()?.to_owned();
            let mut offset = 0;
            if self.take('+') {
                let negative = self.take('-');
                offset = self.number()? as i64 * if negative { -1 } else { 1 };
            } else if self.take('-') {
                offset = -(self.number()? as i64);
            }
            let mut coordinates = Vec::new();
            while self.take(',') {
                coordinates.push(self.operand()?);
            }
            self.expect(']')?;
            return Ok(Written::Address { base, offset, coordinates });
        }
        let word = self.word()?.to_owned();
        if self.take('|') {
            return Ok(Written::Pair(word, self.word()?.to_owned()));
        }
        Ok(Written::Word(word))
    }

    fn skip(&mut self, count: usize) {
        self.at += count;
    }

    fn skip_block(&mut self) -> Parsed<()> {
        let mut depth = 0;
        while let Some(token) = self.peek() {
            self.at += 1;
            match token {
                Token::Mark('{') => depth += 1,
                Token::Mark('}') => {
                    depth -= 1;
                    if depth == 0 {
                        return Ok(());
                    }
                }
                _ => {}
            }
        }
        Err(self.error("a block has no end"))
    }

    fn peek(&self) -> Option<Token<'a>> {
        self.tokens.get(self.at).map(|placed| placed.token)
    }

    fn line(&self) -> u32 {
        self.tokens.get(self.at).or(self.tokens.last()).map_or(1, |placed| placed.line)
    }

    fn word(&mut self) -> Parsed<&'a str> {
        match self.peek() {
            Some(Token::Word(word)) => {
                self.at += 1;
                Ok(word)
            }
            _ => Err(self.error("expected a name or a number")),
        }
    }

    fn number(&mut self) -> Parsed<u64> {
        let negative = self.take('-');
        let word = self.word()?;
        match number(word) {
            Some(value) if negative => Ok(value.wrapping_neg()),
            Some(value) => Ok(value),
            None => Err(self.error(&format!("`{word}` is no number"))),
        }
    }

    fn take(&mut self, mark: char) -> bool {
        let found = self.peek() == Some(Token::Mark(mark));
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, mark: char) -> Parsed<()> {
        if self.take(mark) {
            return Ok(());
        }
        Err(self.error(&format!("expected `{mark}`")))
    }

    fn error(&self, reason: &str) -> ParseError {
        let found = match self.peek() {
            Some(Token::Word(text) | Token::Text(text)) => format!("`{text}`"),
            Some(Token::Mark(mark)) => format!("`{mark}`"),
            None => "the end".to_owned(),
        };
        ParseError::new(self.line(), format!("{reason}, found {found}"))
    }
}

/// Bytes of a value of a type.
pub(super) fn bytes_of(ty: &str) -> Option<u64> {
    Some(match ty {
        ".b8" | ".u8" | ".s8" => 1,
        ".b16" | ".u16" | ".s16" | ".f16" | ".bf16" => 2,
        ".b32" | ".u32" | ".s32" | ".f32" | ".f16x2" | ".bf16x2" => 4,
        ".b64" | ".u64" | ".s64" | ".f64" => 8,
        ".b128" => 16,
        _ => return None,
    })
}

/// The bits of an integer, of `0f3F800000` or of `0d3FF0000000000000`.
pub(super) fn number(word: &str) -> Option<u64> {
    let hexadecimal = |digits: &str| u64::from_str_radix(digits, 16).ok();
    match word.get(..2) {
        Some("0x" | "0X") => hexadecimal(word[2..].trim_end_matches('U')),
        Some("0f" | "0F" | "0d" | "0D") => hexadecimal(&word[2..]),
        _ => word.trim_end_matches('U').parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_is_read_with_its_variables_scopes_and_labels() {
        let text = ".version 9.0\n.target sm_90a\n.address_size 64\n\
            .extern .shared .align 128 .b8 dynamic[];\n.global .align 4 .b8 table[8] = {1, 0x2};\n\
            .visible .entry kernel(\n.param .u64 .ptr .align 1 kernel_param_0,\n\
            .param .align 64 .b8 kernel_param_1[128]\n)\n.maxntid 256, 1, 1\n{\n.reg .pred %p<2>;\n\
            { .reg .b32 t, a<4>; WAIT: @!%p1 bra WAIT; }\n\
            ld.param.v2.u64 {%rd1, %rd2}, [kernel_param_1+8];\nret;\n}\n";
        let source = read(text).unwrap();
        assert_eq!(source.target, "sm_90a");
        assert_eq!((source.variables[0].count, source.variables[0].align), (None, 128));
        assert_eq!(source.variables[1].values, [1, 2]);
        let entry = &source.entries[0];
        assert_eq!(entry.parameters[0].name, "kernel_param_0");
        assert_eq!((entry.parameters[1].align, entry.parameters[1].count), (64, Some(128)));
        assert_eq!(entry.items.len(), 9);
    }

    #[test]
    fn what_is_no_ptx_is_refused_with_its_line() {
        let error = read(".version 9.0\nrubbish\n").unwrap_err();
        assert_eq!(
            error.to_string(),
            "PTX line 2: expected a directive of a module, found `rubbish`"
        );
    }

    #[test]
    fn numbers_are_read_as_bits() {
        assert_eq!(number("0f3F800000"), Some(0x3f80_0000));
        assert_eq!(number("0x10"), Some(16));
        assert_eq!(number("%r1"), None);
    }
}
