//! Arguments that refer to an input's columns: `vector => v`, `weight => n * 2`,
//! `vector => ['x', 'y + 1']`.
//!
//! They are expressions over the input. A plain column is used directly; any other expression
//! becomes a column of a projection below the node, under a name that the input does not have. So a
//! node finds its columns by unique names, whatever names the user has chosen.

use std::collections::HashSet;
use std::fmt;

use datafusion::arrow::array::Array;
use datafusion::arrow::datatypes::DataType;
use datafusion::catalog::Session;
use datafusion::common::{Column, DFSchema, ScalarValue, plan_err};
use datafusion::error::Result;
use datafusion::execution::SessionState;
use datafusion::logical_expr::{Cast, Expr, ExprSchemable, LogicalPlan, LogicalPlanBuilder};
use datafusion::sql::sqlparser::ast;
use datafusion::sql::sqlparser::dialect::GenericDialect;
use datafusion::sql::sqlparser::parser::Parser;
use datafusion::sql::sqlparser::tokenizer::Token;

use crate::exec::{VectorColumn, kind_of_vector};
use crate::matrix::ElementKind;
use crate::metric::Metric;

/// Turns SQL into an expression over a schema.
pub(in crate::sql) type Resolve<'a> = dyn FnMut(ast::Expr, &DFSchema) -> Result<Expr> + 'a;

/// Resolves expressions with a session's own functions.
pub(in crate::sql) fn resolve_with(
    state: &SessionState,
) -> impl FnMut(ast::Expr, &DFSchema) -> Result<Expr> {
    |expr, schema| state.create_logical_expr(&expr.to_string(), schema)
}

/// Resolves expressions with a session's own functions if it is a [`SessionState`], else only names
/// of columns.
pub(in crate::sql) fn resolve_in(
    session: &dyn Session,
) -> impl FnMut(ast::Expr, &DFSchema) -> Result<Expr> {
    let state = session.as_any().downcast_ref::<SessionState>().cloned();
    move |expr, schema| match &state {
        Some(state) => state.create_logical_expr(&expr.to_string(), schema),
        None => plan_err!("{expr} is no column's name"),
    }
}

/// A column argument before its input is known: one column, or one per dimension.
#[derive(Debug, Clone)]
pub(in crate::sql) struct ColumnArgument {
    columns: Vec<ast::Expr>,
    is_list: bool,
}

impl ColumnArgument {
    /// The names of those that are columns as they are.
    pub fn names(&self) -> Vec<String> {
        let of_ident = |ident: &ast::Ident| match ident.quote_style {
            Some(_) => ident.value.clone(),
            None => ident.value.to_ascii_lowercase(),
        };
        let name = |expr: &ast::Expr| match expr {
            ast::Expr::Identifier(ident) => Some(of_ident(ident)),
            ast::Expr::CompoundIdentifier(idents) => idents.last().map(of_ident),
            ast::Expr::Value(value) => value.value.clone().into_string(),
            _ => None,
        };
        self.columns.iter().filter_map(name).collect()
    }

    /// `None` if this cannot be a column.
    pub fn from_sql(arg: &ast::Expr) -> Option<Self> {
        match arg {
            ast::Expr::Array(array) if array.elem.is_empty() => None,
            ast::Expr::Array(array) => Some(Self { columns: array.elem.clone(), is_list: true }),
            ast::Expr::Value(value) if value.value.clone().into_string().is_none() => None,
            one => Some(Self { columns: vec![one.clone()], is_list: false }),
        }
    }

    /// A name, or a list of names.
    pub fn from_literal(value: &ScalarValue) -> Option<Self> {
        if let Some(name) = value.try_as_str().flatten() {
            return Some(Self { columns: vec![text(name)], is_list: false });
        }
        let ScalarValue::List(list) = value else { return None };
        let values = list.value(0);
        let names = (0..values.len()).map(|i| {
            let name = ScalarValue::try_from_array(&values, i).ok()?;
            name.try_as_str().flatten().map(text)
        });
        let columns = names.collect::<Option<Vec<_>>>().filter(|names| !names.is_empty())?;
        Some(Self { columns, is_list: true })
    }

    /// The columns with these names.
    pub fn from_names(column: &VectorColumn) -> Self {
        let columns = column.names().iter().map(|name| text(name)).collect();
        Self { columns, is_list: matches!(column, VectorColumn::Dimensions(_)) }
    }

    /// Resolves to expressions, each with its label for errors and EXPLAIN.
    fn resolve(
        &self,
        input: &str,
        schema: &DFSchema,
        resolve: &mut Resolve<'_>,
    ) -> Result<Vec<(String, Expr)>> {
        self.columns.iter().map(|column| one_column(column, input, schema, resolve)).collect()
    }
}

fn text(name: &str) -> ast::Expr {
    ast::Expr::Value(ast::Value::SingleQuotedString(name.to_string()).into())
}

/// Resolves one column; a string that is no column's name is parsed as an expression.
fn one_column(
    column: &ast::Expr,
    input: &str,
    schema: &DFSchema,
    resolve: &mut Resolve<'_>,
) -> Result<(String, Expr)> {
    let ast::Expr::Value(value) = column else {
        let label = column.to_string();
        return match resolve(column.clone(), schema) {
            Ok(expr) => Ok((name_of(&expr).unwrap_or(label), expr)),
            Err(error) => match column {
                ast::Expr::Identifier(name) => no_column(&name.value, input, schema),
                _ => Err(error),
            },
        };
    };
    let Some(name) = value.value.clone().into_string() else {
        return plan_err!("column {column} of {input} is no name of a column, and no expression");
    };
    let found = schema.iter().find(|(_, field)| *field.name() == name);
    if let Some((qualifier, field)) = found {
        let column = Column::new(qualifier.cloned(), field.name());
        return Ok((name, Expr::Column(column)));
    }
    let parsed = Parser::new(&GenericDialect {}).try_with_sql(&name).and_then(|mut parser| {
        let expr = parser.parse_expr()?;
        parser.expect_token(&Token::EOF)?;
        Ok(expr)
    });
    match parsed {
        Ok(ast::Expr::Identifier(_)) | Err(_) => no_column(&name, input, schema),
        Ok(expr) => Ok((name, resolve(expr, schema)?)),
    }
}

fn name_of(expr: &Expr) -> Option<String> {
    if let Expr::Column(column) = expr { Some(column.name.clone()) } else { None }
}

fn no_column<T>(name: &str, input: &str, schema: &DFSchema) -> Result<T> {
    let names = schema.fields().iter().map(|f| f.name().as_str()).collect::<Vec<_>>().join(", ");
    plan_err!("no column '{name}' in {input}; it has {names}")
}

/// How the vector columns of an input appear in the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::sql) enum VectorUse {
    /// The node consumes them; the output does not have them.
    Taken,
    /// The node takes copies, which share their memory, and the columns are carried like others.
    Copied,
    /// The node passes all columns of its input on.
    Shared,
}

/// What a column of vectors is to hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::sql) enum Compared {
    /// Numbers or bits.
    Any,
    /// Numbers.
    Numbers,
    /// Bits.
    Bits,
    /// Bits, or integers of sets.
    BitsOrSets,
}

impl Compared {
    /// What a search under this metric compares, if it is known.
    pub fn under(metric: Option<Metric>) -> Self {
        match metric {
            None => Self::Any,
            Some(metric) if metric.accepts(ElementKind::Sets) => Self::BitsOrSets,
            Some(metric) if metric.is_binary() => Self::Bits,
            Some(_) => Self::Numbers,
        }
    }

    /// The same of a function that takes no sets.
    pub fn without_sets(self) -> Self {
        if self == Self::BitsOrSets { Self::Bits } else { self }
    }

    /// A metric that compares the same.
    fn metric(self) -> Option<Metric> {
        (self == Self::BitsOrSets).then_some(Metric::Jaccard)
    }

    fn has(self, found: &DataType) -> bool {
        kind_of_vector(found, self.metric()).is_some_and(|kind| match self {
            Self::Any => true,
            Self::Numbers => kind != ElementKind::Bits,
            Self::Bits => kind == ElementKind::Bits,
            Self::BitsOrSets => matches!(kind, ElementKind::Bits | ElementKind::Sets),
        })
    }
}

impl fmt::Display for Compared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Any => "lists of numbers or binary strings",
            Self::Numbers => "lists of numbers",
            Self::Bits => "binary strings",
            Self::BitsOrSets => "binary strings or lists of integers",
        })
    }
}

/// An input of a call, while its columns are being resolved.
pub(in crate::sql) struct InputColumns<'a, 'b> {
    function: &'a str,
    input: &'a str,
    plan: LogicalPlan,
    resolve: &'a mut Resolve<'b>,
    names: HashSet<String>,
    taken: Vec<Column>,
    added: Vec<Expr>,
}

impl<'a, 'b> InputColumns<'a, 'b> {
    /// # Errors
    /// Two columns with the same name, which the output could not tell apart.
    pub fn try_new(
        function: &'a str,
        input: &'a str,
        plan: LogicalPlan,
        resolve: &'a mut Resolve<'b>,
    ) -> Result<Self> {
        let mut names = HashSet::new();
        for (qualifier, field) in plan.schema().iter() {
            if !names.insert(field.name().clone()) {
                let columns: Vec<_> = (plan.schema().columns().into_iter())
                    .filter(|column| column.name == *field.name())
                    .map(|column| column.flat_name())
                    .collect();
                let from = if qualifier.is_some() { columns.join(" and ") } else { String::new() };
                let from = if from.is_empty() { from } else { format!(" ({from})") };
                return plan_err!(
                    "{function}: {input} has several columns called '{}'{from}; give them different \
                     names in a subquery",
                    field.name()
                );
            }
        }
        Ok(Self { function, input, plan, resolve, names, taken: vec![], added: vec![] })
    }

    /// The column of vectors asked for, or the only one that fits.
    pub fn vector(
        &mut self,
        asked: Option<&ColumnArgument>,
        compared: Compared,
        use_of: VectorUse,
    ) -> Result<VectorColumn> {
        let schema = self.plan.schema().clone();
        let (exprs, is_list) = match asked {
            Some(asked) => {
                let exprs = asked.resolve(self.input, &schema, self.resolve)?;
                (exprs, asked.is_list)
            }
            None => {
                let column = only_vector(self.function, self.input, &schema, compared)?;
                (vec![(column.name.clone(), Expr::Column(column))], false)
            }
        };
        let labels = exprs.iter().map(|(label, _)| label.clone()).collect();
        let mut types = Vec::new();
        let mut decoded = Vec::new();
        for (label, expr) in exprs {
            let found = expr.get_type(schema.as_ref())?;
            let (expr, found) = decode(expr, found);
            types.push(found);
            decoded.push((label, expr));
        }
        let whole = |names: Vec<String>| match (is_list, <[String; 1]>::try_from(names)) {
            (false, Ok([name])) => VectorColumn::Whole(name),
            (_, Ok(names)) => VectorColumn::Dimensions(names.to_vec()),
            (_, Err(names)) => VectorColumn::Dimensions(names),
        };
        let labels = whole(labels);
        if labels.kind(&types.iter().collect::<Vec<_>>(), compared.metric()).is_none() {
            let (input, names) = (self.input, labels.names().join(", "));
            let types = types.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            return plan_err!("column {names} of {input} holds no vectors, but {types}");
        }
        let names =
            decoded.into_iter().map(|(label, expr)| self.place(expr, &label, "vector", use_of));
        Ok(whole(names.collect()))
    }

    /// The column of weights that an argument gives.
    pub fn weight(&mut self, asked: &ColumnArgument) -> Result<String> {
        let schema = self.plan.schema().clone();
        let (function, input) = (self.function, self.input);
        let [column] = asked.columns.as_slice() else {
            return plan_err!("{function}: argument 'weight' takes one column");
        };
        let found = one_column(column, input, &schema, self.resolve);
        if let Ok((label, expr)) = found {
            let (expr, found) = decode(expr.clone(), expr.get_type(schema.as_ref())?);
            let numbers = VectorColumn::Dimensions(vec![label.clone()]);
            if !asked.is_list && numbers.kind(&[&found], None).is_some() {
                return Ok(self.place(expr, &label, "weight", VectorUse::Shared));
            }
        }
        plan_err!(
            "{function}: argument 'weight' is {column}; accepted is a column of numbers of \
             {input}, or an expression over its columns"
        )
    }

    /// The name of the column that holds an expression.
    fn place(&mut self, expr: Expr, label: &str, what: &str, use_of: VectorUse) -> String {
        match (&expr, use_of) {
            (Expr::Column(column), VectorUse::Taken | VectorUse::Shared) => {
                return column.name.clone();
            }
            (Expr::Cast(Cast { expr, .. }), VectorUse::Taken) => {
                if let Expr::Column(column) = expr.as_ref() {
                    self.taken.push(column.clone());
                }
            }
            (Expr::Column(_) | Expr::Cast(_), _) => {}
            (_, VectorUse::Copied) => {
                let kept = self.new_name(label, label);
                self.added.push(expr.clone().alias(kept));
            }
            _ => {}
        }
        let name = self.new_name(&format!("{label} ({what})"), label);
        self.added.push(expr.alias(name.clone()));
        name
    }

    fn new_name(&mut self, wanted: &str, label: &str) -> String {
        let mut name = wanted.to_string();
        let mut next = 2;
        while !self.names.insert(name.clone()) {
            name = format!("{label} ({next})");
            next += 1;
        }
        name
    }

    /// The input with these columns.
    pub fn into_plan(self) -> Result<LogicalPlan> {
        if self.added.is_empty() {
            return Ok(self.plan);
        }
        let columns = self.plan.schema().columns().into_iter();
        let columns = columns.filter(|column| !self.taken.contains(column)).map(Expr::Column);
        let columns: Vec<_> = columns.chain(self.added).collect();
        LogicalPlanBuilder::from(self.plan).project(columns)?.build()
    }
}

/// Casts a dictionary-encoded expression to its value type; also returns the resulting type.
fn decode(expr: Expr, found: DataType) -> (Expr, DataType) {
    match found {
        DataType::Dictionary(_, values) => {
            let decoded = values.as_ref().clone();
            (datafusion::logical_expr::cast(expr, decoded.clone()), decoded)
        }
        found => (expr, found),
    }
}

/// The only column that holds vectors for the metric.
pub(in crate::sql) fn only_vector(
    function: &str,
    input: &str,
    schema: &DFSchema,
    compared: Compared,
) -> Result<Column> {
    let holds_vectors = |found: &DataType| {
        let found = if let DataType::Dictionary(_, values) = found { values } else { found };
        compared.has(found)
    };
    let candidates: Vec<_> = (schema.iter())
        .filter(|(_, field)| holds_vectors(field.data_type()))
        .map(|(qualifier, field)| Column::new(qualifier.cloned(), field.name()))
        .collect();
    match candidates.as_slice() {
        [only] => Ok(only.clone()),
        [] => {
            let columns = schema.fields().iter().map(|f| format!("{} {}", f.name(), f.data_type()));
            let columns = columns.collect::<Vec<_>>().join(", ");
            let hint = match compared {
                Compared::Bits | Compared::BitsOrSets => "",
                _ => ". Numeric columns serve as dimensions with vector => ['x', 'y']",
            };
            plan_err!(
                "{function}: {input} has no column of {compared}; its columns are {columns}{hint}"
            )
        }
        several => {
            let several = several.iter().map(|c| c.name.as_str()).collect::<Vec<_>>().join(", ");
            plan_err!(
                "{function}: {input} has several columns of vectors: {several}; \
                 name one with vector => '…'"
            )
        }
    }
}
