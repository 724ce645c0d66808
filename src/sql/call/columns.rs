//! Arguments that refer to an input's columns: `vector => v`, `weight => n * 2`,
//! `vector => ['x', 'y + 1']`.
//!
//! The arguments are expressions over the input. A plain column is used directly; any other
//! expression becomes a column of a projection below the node, under a new name. So a node finds
//! its columns by unique names, whatever names the user has chosen.

use std::collections::HashSet;

use arrow::array::Array;
use arrow::datatypes::DataType;
use datafusion::catalog::Session;
use datafusion::common::{
    Column, DFSchema, DataFusionError, ScalarValue, SchemaError, plan_datafusion_err, plan_err,
};
use datafusion::error::Result;
use datafusion::execution::SessionState;
use datafusion::logical_expr::{Cast, Expr, ExprSchemable, LogicalPlan, LogicalPlanBuilder};
use datafusion::sql::sqlparser::ast;
use datafusion::sql::sqlparser::dialect::GenericDialect;
use datafusion::sql::sqlparser::parser::Parser;
use datafusion::sql::sqlparser::tokenizer::Token;

use super::vector_kind::{VectorKind, is_of_nulls};
use crate::exec::{VectorColumn, vector_name, weight_name};

/// A relation with vectors: an input of a node.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct VectorInput {
    /// The columns of its vectors.
    pub vector: VectorColumn,
    /// The relation.
    pub plan: LogicalPlan,
}

/// A function that turns SQL into an expression over a schema.
pub(in crate::sql) type Resolve<'a> = dyn FnMut(ast::Expr, &DFSchema) -> Result<Expr> + 'a;

/// Resolves expressions with a session's own functions.
pub(in crate::sql) fn resolve_with(
    state: &SessionState,
) -> impl FnMut(ast::Expr, &DFSchema) -> Result<Expr> {
    |expr, schema| state.create_logical_expr(&expr.to_string(), schema)
}

/// Resolves expressions with a session's own functions if it is a [`SessionState`], else names of
/// columns only.
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
    /// The names of the plain columns.
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

    /// Interprets an SQL expression as columns; `None` if it cannot be columns.
    pub fn from_sql(arg: &ast::Expr) -> Option<Self> {
        match arg {
            ast::Expr::Array(array) if array.elem.is_empty() => None,
            ast::Expr::Array(array) => Some(Self { columns: array.elem.clone(), is_list: true }),
            ast::Expr::Value(value) if value.value.clone().into_string().is_none() => None,
            one => Some(Self { columns: vec![one.clone()], is_list: false }),
        }
    }

    /// Interprets a literal as the name of a column, or a list of names.
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

    /// Resolves the columns to expressions, each with a label for errors and EXPLAIN.
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

/// Resolves one column; a string other than a column's name is parsed as an expression.
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
            Err(error) => Err(match (looked_up(&error), column) {
                (Some(name), _) => no_column(name, '"', input, schema),
                (None, ast::Expr::Identifier(name)) => no_column(&name.value, '"', input, schema),
                (None, _) => error,
            }),
        };
    };
    let Some(name) = value.value.clone().into_string() else {
        return plan_err!("column {column} of {input} is no name of a column, and no expression");
    };
    let field = schema.iter().find(|(_, field)| *field.name() == name);
    if let Some((qualifier, field)) = field {
        let column = Column::new(qualifier.cloned(), field.name());
        return Ok((name, Expr::Column(column)));
    }
    let parsed = Parser::new(&GenericDialect {}).try_with_sql(&name).and_then(|mut parser| {
        let expr = parser.parse_expr()?;
        parser.expect_token(&Token::EOF)?;
        Ok(expr)
    });
    match parsed {
        Ok(ast::Expr::Identifier(_)) | Err(_) => Err(no_column(&name, '\'', input, schema)),
        Ok(expr) => match resolve(expr, schema) {
            Ok(expr) => Ok((name, expr)),
            Err(error) => Err(match looked_up(&error) {
                Some(missing) => no_column(missing, '"', input, schema),
                None => error,
            }),
        },
    }
}

fn name_of(expr: &Expr) -> Option<String> {
    if let Expr::Column(column) = expr { Some(column.name.clone()) } else { None }
}

/// A column's name as an SQL identifier.
fn quoted(name: &str) -> String {
    Column::from_name(name).quoted_flat_name()
}

/// The name of the missing column, if the error is a failed look-up.
fn looked_up(error: &DataFusionError) -> Option<&str> {
    let DataFusionError::SchemaError(error, _) = error.find_root() else { return None };
    match error.as_ref() {
        SchemaError::FieldNotFound { field, .. } if field.relation.is_none() => {
            Some(field.name.as_str())
        }
        _ => None,
    }
}

/// The error for a column name that does not exist. Names in these quotes are case-sensitive.
fn no_column(name: &str, quote: char, input: &str, schema: &DFSchema) -> DataFusionError {
    let names: Vec<_> = schema.fields().iter().map(|field| field.name().as_str()).collect();
    let hint = match names.iter().find(|other| other.eq_ignore_ascii_case(name)) {
        Some(meant) if quote == '"' => format!("; write \"{meant}\" in double quotes"),
        Some(meant) => format!("; write '{meant}'"),
        None => String::new(),
    };
    plan_datafusion_err!("no column '{name}' in {input}; it has {}{hint}", names.join(", "))
}

/// The treatment of an input's vector columns in the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::sql) enum VectorUse {
    /// The node consumes the vectors; they are absent from the output.
    Taken,
    /// The node takes copies, which share buffers, and the columns are carried like others.
    Copied,
    /// The node passes all columns of its input on.
    Shared,
}

/// The resolver of the columns of a call's input.
pub(in crate::sql) struct ColumnResolver<'a, 'b> {
    function: &'a str,
    input: &'a str,
    plan: LogicalPlan,
    resolve: &'a mut Resolve<'b>,
    names: HashSet<String>,
    /// The type that an all-NULL column is read as, if known.
    of_nulls: Option<DataType>,
    taken: Vec<Column>,
    added: Vec<Expr>,
}

/// A requested expression.
struct RequestedColumn {
    label: String,
    expr: Expr,
    data_type: DataType,
}

impl<'a, 'b> ColumnResolver<'a, 'b> {
    /// # Errors
    /// Two columns with the same name, which would be ambiguous in the output.
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
        let (of_nulls, taken, added) = (None, vec![], vec![]);
        Ok(Self { function, input, plan, resolve, names, of_nulls, taken, added })
    }

    /// Sets the type that an all-NULL column is read as.
    pub fn with_nulls_of(self, of_nulls: Option<DataType>) -> Self {
        Self { of_nulls, ..self }
    }

    /// The requested column of vectors, or the only one that fits.
    pub fn vector(
        &mut self,
        requested: Option<&ColumnArgument>,
        vector_kind: VectorKind,
        use_of: VectorUse,
    ) -> Result<VectorColumn> {
        let (exprs, is_list) = self.requested(requested, vector_kind)?;
        let of_nulls = match (&self.of_nulls, is_list) {
            (_, true) => DataType::Float32,
            (Some(known), false) => known.clone(),
            (None, false) => vector_kind.of_nulls(),
        };
        let mut names = Vec::new();
        for RequestedColumn { label, expr, data_type } in exprs {
            let written = name_of(&expr).map_or_else(|| label.clone(), |name| quoted(&name));
            let (expr, data_type) = decode(expr, data_type, &of_nulls);
            self.check(&label, &written, &data_type, is_list, vector_kind)?;
            names.push(self.place(expr, &label, vector_name, use_of));
        }
        Ok(match (is_list, <[String; 1]>::try_from(names)) {
            (false, Ok([name])) => VectorColumn::Whole(name),
            (_, Ok(names)) => VectorColumn::Dimensions(names.to_vec()),
            (_, Err(names)) => VectorColumn::Dimensions(names),
        })
    }

    /// The type of the column of vectors, as a list or binary string of any length; `None` if it is
    /// all-NULL, has no vectors, or there is one column per dimension.
    pub fn vector_type(
        &mut self,
        requested: Option<&ColumnArgument>,
        vector_kind: VectorKind,
    ) -> Result<Option<DataType>> {
        let (exprs, is_list) = self.requested(requested, vector_kind)?;
        Ok(match exprs.as_slice() {
            [column] if !is_list => vector_kind.of_any_length(&column.data_type),
            _ => None,
        })
    }

    /// The requested expressions, and whether each is a dimension.
    fn requested(
        &mut self,
        requested: Option<&ColumnArgument>,
        vector_kind: VectorKind,
    ) -> Result<(Vec<RequestedColumn>, bool)> {
        let schema = self.plan.schema().clone();
        let (exprs, is_list) = match requested {
            Some(requested) => {
                let exprs = requested.resolve(self.input, &schema, self.resolve)?;
                (exprs, requested.is_list)
            }
            None => {
                let column = only_vector(self.function, self.input, &schema, vector_kind)?;
                (vec![(column.name.clone(), Expr::Column(column))], false)
            }
        };
        let typed = exprs.into_iter().map(|(label, expr)| {
            let data_type = expr.get_type(schema.as_ref())?;
            Ok::<_, DataFusionError>(RequestedColumn { label, expr, data_type })
        });
        Ok((typed.collect::<Result<_>>()?, is_list))
    }

    /// Refuses a column without vectors, or a dimension without numbers.
    fn check(
        &self,
        label: &str,
        written: &str,
        data_type: &DataType,
        is_dimension: bool,
        vector_kind: VectorKind,
    ) -> Result<()> {
        let (name, input) = (label.to_string(), self.input);
        if is_dimension {
            return match VectorColumn::Dimensions(vec![name]).kind(&[data_type], None) {
                Some(_) => Ok(()),
                None => plan_err!("column {label} of {input} holds no numbers, but {data_type}"),
            };
        }
        match VectorColumn::Whole(name).kind(&[data_type], vector_kind.metric()) {
            Some(_) => Ok(()),
            None => {
                let advice = vector_kind.advice(written, data_type);
                plan_err!("column {label} of {input} holds no vectors, but {data_type}{advice}")
            }
        }
    }

    /// Adds the column of weights, and returns its name.
    pub fn weight(&mut self, requested: &ColumnArgument) -> Result<String> {
        let schema = self.plan.schema().clone();
        let (function, input) = (self.function, self.input);
        let [column] = requested.columns.as_slice() else {
            return plan_err!("{function}: argument 'weight' takes one column");
        };
        let (label, expr) = one_column(column, input, &schema, self.resolve)?;
        let data_type = expr.get_type(schema.as_ref())?;
        let (expr, data_type) = decode(expr, data_type, &DataType::Float64);
        let numbers = VectorColumn::Dimensions(vec![label.clone()]);
        if !requested.is_list && numbers.kind(&[&data_type], None).is_some() {
            return Ok(self.place(expr, &label, weight_name, VectorUse::Shared));
        }
        plan_err!(
            "{function}: argument 'weight' is {column}; accepted is a column of numbers of \
             {input}, or an expression over its columns"
        )
    }

    /// Adds a column for an expression if necessary, and returns its name: the label, or the first
    /// of the `others` that is not in use.
    fn place(
        &mut self,
        expr: Expr,
        label: &str,
        others: fn(&str, usize) -> String,
        use_of: VectorUse,
    ) -> String {
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
                let renamed = self.new_name(label, |label, number| format!("{label} ({number})"));
                self.added.push(expr.clone().alias(renamed));
            }
            _ => {}
        }
        let name = self.new_name(label, others);
        self.added.push(expr.alias(name.clone()));
        name
    }

    fn new_name(&mut self, label: &str, others: impl Fn(&str, usize) -> String) -> String {
        let mut name = label.to_string();
        let mut next = 2;
        while !self.names.insert(name.clone()) {
            name = others(label, next);
            next += 1;
        }
        name
    }

    /// The input with the added columns.
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

/// Casts a dictionary-encoded expression to its value type, and a NULL one to `of_nulls`; also
/// returns the resulting type.
fn decode(expr: Expr, data_type: DataType, of_nulls: &DataType) -> (Expr, DataType) {
    let decoded = match data_type {
        DataType::Dictionary(_, values) => *values,
        DataType::Null => of_nulls.clone(),
        data_type => return (expr, data_type),
    };
    (datafusion::logical_expr::cast(expr, decoded.clone()), decoded)
}

/// The only column of vectors for the metric, or else the only column that is all-NULL: a file
/// without a single vector may not tell the type of its vectors.
pub(in crate::sql) fn only_vector(
    function: &str,
    input: &str,
    schema: &DFSchema,
    vector_kind: VectorKind,
) -> Result<Column> {
    let mut candidates =
        columns_that(schema, |data_type| vector_kind.has(data_type) && !is_of_nulls(data_type));
    if candidates.is_empty() {
        candidates =
            columns_that(schema, |data_type| vector_kind.has(data_type) || data_type.is_null());
    }
    match candidates.as_slice() {
        [only] => Ok(only.clone()),
        [] => plan_err!("{function}: {}", no_vector(input, schema, vector_kind)),
        several => {
            let several = several.iter().map(|c| c.name.as_str()).collect::<Vec<_>>().join(", ");
            plan_err!(
                "{function}: {input} has several columns of vectors: {several}; \
                 name one with vector => '…'"
            )
        }
    }
}

/// The columns whose type fits.
fn columns_that(schema: &DFSchema, fit: impl Fn(&DataType) -> bool) -> Vec<Column> {
    let fitting = schema.iter().filter(|(_, field)| fit(field.data_type()));
    fitting.map(|(qualifier, field)| Column::new(qualifier.cloned(), field.name())).collect()
}

/// An error message for an input without a column of vectors, with advice.
fn no_vector(input: &str, schema: &DFSchema, vector_kind: VectorKind) -> String {
    let columns = schema.fields().iter().map(|f| format!("{} {}", f.name(), f.data_type()));
    let columns = columns.collect::<Vec<_>>().join(", ");
    let dimensions = match vector_kind {
        VectorKind::Bits | VectorKind::BitsOrSets => "",
        _ => ". Numeric columns serve as dimensions with vector => ['x', 'y']",
    };
    // The last matching column: columns of vectors tend to come last.
    let mut advice =
        schema.fields().iter().map(|f| vector_kind.advice(&quoted(f.name()), f.data_type()));
    let advice = advice.rfind(|advice| !advice.is_empty()).unwrap_or_default();
    format!("{input} has no column of {vector_kind}; its columns are {columns}{dimensions}{advice}")
}
