//! Which arguments a function takes.

use datafusion::common::plan_err;
use datafusion::error::Result;
use datafusion::sql::sqlparser::ast;

/// A function's name and arguments.
#[derive(Debug)]
pub(in crate::sql) struct Signature {
    pub name: &'static str,
    /// Relations first. A single one given by position is the last of them.
    pub arguments: &'static [Argument],
}

/// An argument of a function.
#[derive(Debug)]
pub(in crate::sql) struct Argument {
    pub name: &'static str,
    pub kind: Kind,
    /// The default where it is omitted, as the function's page states it.
    #[cfg_attr(not(test), expect(dead_code, reason = "a test holds the page to it"))]
    pub default: &'static str,
}

/// What an argument may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::sql) enum Kind {
    /// A relation.
    Input,
    /// A relation that is given by name only.
    Relation,
    /// A constant, or a parameter.
    Value,
    /// Columns of an input, or expressions over them.
    Columns,
    /// The name of one of these methods, or a relation, which `relation` describes.
    MethodOrRelation { methods: &'static [&'static str], relation: &'static str },
}

impl Argument {
    /// An argument that has to be given.
    pub const fn required(name: &'static str, kind: Kind) -> Self {
        Self { name, kind, default: "required" }
    }

    /// An argument that may be left out.
    pub const fn optional(name: &'static str, kind: Kind, default: &'static str) -> Self {
        Self { name, kind, default }
    }
}

impl Signature {
    /// The name of each positional argument.
    pub(super) fn place<T>(
        &self,
        positional: &[T],
        named: &[(&'static str, ast::Expr)],
        is_relation: impl Fn(&T) -> bool,
    ) -> Result<Vec<&'static str>> {
        let free: Vec<_> =
            self.inputs().filter(|input| named.iter().all(|(name, _)| name != input)).collect();
        let relations =
            positional.iter().take(free.len()).take_while(|arg| is_relation(arg)).count();
        let inputs = &free[free.len() - relations..];
        let names: Vec<_> = inputs.iter().copied().chain(self.values()).collect();
        if positional.len() > names.len() {
            return plan_err!("{}: too many arguments", self.describe());
        }
        Ok(names[..positional.len()].to_vec())
    }

    pub(super) fn find(&self, name: &str) -> Result<&'static str> {
        let lower = name.to_ascii_lowercase();
        match self.names().find(|known| *known == lower) {
            Some(known) => Ok(known),
            None => plan_err!("{}: unknown argument '{name}'", self.describe()),
        }
    }

    /// The function with its arguments, for errors.
    pub(super) fn describe(&self) -> String {
        let names: Vec<_> = self.names().collect();
        format!("{}({})", self.name, names.join(", "))
    }

    /// What an argument may be.
    pub(super) fn kind(&self, name: &str) -> Kind {
        let found = self.arguments.iter().find(|argument| argument.name == name);
        found.map_or(Kind::Value, |argument| argument.kind)
    }

    /// All arguments: those by position, in their order, then the others.
    fn names(&self) -> impl Iterator<Item = &'static str> {
        let relations = self.arguments.iter().filter(|argument| argument.kind == Kind::Relation);
        self.inputs().chain(self.values()).chain(relations.map(|argument| argument.name))
    }

    /// The relations, in the order of positions.
    fn inputs(&self) -> impl Iterator<Item = &'static str> {
        let inputs = self.arguments.iter().filter(|argument| argument.kind == Kind::Input);
        inputs.map(|argument| argument.name)
    }

    /// All others, in the order of positions.
    fn values(&self) -> impl Iterator<Item = &'static str> {
        let is_value = |kind| !matches!(kind, Kind::Input | Kind::Relation);
        let values = self.arguments.iter().filter(move |argument| is_value(argument.kind));
        values.map(|argument| argument.name)
    }
}
