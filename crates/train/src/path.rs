//! Where in a module a visitor is.

/// The names of the modules entered, outermost first.
#[derive(Debug, Default)]
pub(crate) struct ModulePath(Vec<String>);

impl ModulePath {
    pub(crate) fn enter(&mut self, name: &str) {
        self.0.push(name.to_string());
    }

    pub(crate) fn exit(&mut self) {
        self.0.pop();
    }

    /// The path of the parameter being visited, as Burn's records and parameter groups write it.
    pub(crate) fn name(&self) -> String {
        self.0.join(".")
    }
}
