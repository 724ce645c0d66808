//! The signature of a function: its arguments, their kinds and defaults.

use datafusion::common::plan_err;
use datafusion::error::Result;
use datafusion::sql::sqlparser::ast;

/// The table function that lists all functions and their arguments.
pub(in crate::sql) const LISTING: &str = "neighbors_functions";

/// A function's name and arguments.
#[derive(Debug)]
pub(in crate::sql) struct CallSignature {
    pub name: &'static str,
    /// The arguments, relations first. A single relation given by position is the last one.
    pub arguments: &'static [Argument],
}

/// An argument of a function, as documented on its page.
#[derive(Debug, Clone, Copy)]
pub(in crate::sql) struct Argument {
    pub name: &'static str,
    pub kind: ArgumentKind,
    /// The default of an optional argument; `None` if the argument is required.
    pub default: Option<&'static str>,
    /// The meaning: the beginning of the description on the page.
    pub meaning: &'static str,
}

/// The vector columns of an input.
pub(in crate::sql) const VECTOR: Argument = Argument::optional(
    "vector",
    ArgumentKind::Columns,
    "the only column that can be one",
    "The column of vectors, or an array of numeric columns that are the dimensions",
);

/// The rows to cluster.
pub(in crate::sql) const CLUSTERED: Argument = Argument::required(
    "input",
    ArgumentKind::Input,
    "The rows: a table, view or CTE, a subquery in parentheses, a file by its path in quotes",
);

/// The vector of a row, in a window function.
pub(in crate::sql) const GROUPED: Argument =
    Argument::required("v", ArgumentKind::Columns, "List of numbers");

/// The weights of rows.
pub(in crate::sql) const WEIGHT: Argument = Argument::optional(
    "weight",
    ArgumentKind::Columns,
    "none",
    "Row weights, from 0: a numeric column, or an expression over columns",
);

/// The kind of an argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::sql) enum ArgumentKind {
    /// A relation, by position or by name.
    Input,
    /// A relation or one vector, by position or by name.
    InputOrVector,
    /// A relation, by name only.
    Relation,
    /// A constant, or a parameter such as $1.
    Value,
    /// Columns of an input, or expressions over them.
    Columns,
    /// The name of one of these methods, or a relation, described by `relation`.
    MethodOrRelation { methods: &'static [&'static str], relation: &'static str },
}

impl Argument {
    /// A required argument.
    pub const fn required(name: &'static str, kind: ArgumentKind, meaning: &'static str) -> Self {
        Self { name, kind, default: None, meaning }
    }

    /// An optional argument.
    pub const fn optional(
        name: &'static str,
        kind: ArgumentKind,
        default: &'static str,
        meaning: &'static str,
    ) -> Self {
        Self { name, kind, default: Some(default), meaning }
    }
}

impl ArgumentKind {
    /// Whether it is a relation that may be given by position.
    fn is_input(self) -> bool {
        matches!(self, Self::Input | Self::InputOrVector)
    }

    /// The accepted values, in words.
    pub fn accepted(self) -> String {
        match self {
            Self::Input => "relation".to_string(),
            Self::InputOrVector => "relation or vector".to_string(),
            Self::Relation => "relation, by name".to_string(),
            Self::Value => "constant".to_string(),
            Self::Columns => "columns".to_string(),
            Self::MethodOrRelation { methods, relation } => {
                let methods: Vec<_> = methods.iter().map(|name| format!("'{name}'")).collect();
                format!("{} or {relation}", methods.join(", "))
            }
        }
    }
}

impl CallSignature {
    /// The names of the positional arguments.
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

    /// The error message for a missing argument.
    pub(super) fn missing(&self, name: &str) -> String {
        let meaning = self.argument(name).map(|argument| format!(" ({})", argument.meaning));
        format!(
            "{}: argument '{name}' is missing{}; SELECT * FROM {LISTING}() describes all arguments",
            self.describe(),
            meaning.unwrap_or_default()
        )
    }

    /// The kind of an argument.
    pub(super) fn kind(&self, name: &str) -> ArgumentKind {
        self.argument(name).map_or(ArgumentKind::Value, |argument| argument.kind)
    }

    /// Whether an argument has no default.
    pub(super) fn requires(&self, name: &str) -> bool {
        self.argument(name).is_some_and(|argument| argument.default.is_none())
    }

    fn argument(&self, name: &str) -> Option<&'static Argument> {
        self.arguments.iter().find(|argument| argument.name == name)
    }

    /// The positional arguments in order, then the arguments by name only.
    pub fn in_order(&self) -> impl Iterator<Item = &'static Argument> {
        self.of(ArgumentKind::is_input)
            .chain(self.of(|kind| !kind.is_input() && kind != ArgumentKind::Relation))
            .chain(self.of(|kind| kind == ArgumentKind::Relation))
    }

    /// The names of all arguments, in the order of [`in_order`](Self::in_order).
    fn names(&self) -> impl Iterator<Item = &'static str> {
        self.in_order().map(|argument| argument.name)
    }

    /// The names of the relations, by position.
    fn inputs(&self) -> impl Iterator<Item = &'static str> {
        self.of(ArgumentKind::is_input).map(|argument| argument.name)
    }

    /// The names of the other positional arguments, by position.
    fn values(&self) -> impl Iterator<Item = &'static str> {
        let values = self.of(|kind| !kind.is_input() && kind != ArgumentKind::Relation);
        values.map(|argument| argument.name)
    }

    /// The arguments of the kinds that `is_wanted` accepts.
    fn of(
        &self,
        is_wanted: impl Fn(ArgumentKind) -> bool,
    ) -> impl Iterator<Item = &'static Argument> {
        self.arguments.iter().filter(move |argument| is_wanted(argument.kind))
    }
}
