//! An error as a client sees it.

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Deref;

/// An error or a notice that the server sent. Its fields are those of [`Fields`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault(Box<Fields>);

/// The server's message.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fields {
    /// `ERROR`, `FATAL`, `WARNING`, `NOTICE`…
    pub severity: String,
    /// The SQLSTATE. `08000` stands for a broken connection.
    pub sqlstate: String,
    /// The primary message: one line.
    pub message: String,
    /// The DETAIL: for pg_fence's own errors one JSON object.
    pub detail: Option<String>,
    pub hint: Option<String>,
    /// The schema that the error names.
    pub schema: Option<String>,
    /// The table that the error names.
    pub table: Option<String>,
    /// The column that the error names.
    pub column: Option<String>,
    /// The functions and statements in which the error was raised.
    pub context: Option<String>,
}

impl Fault {
    /// Returns the detail as JSON.
    pub fn json(&self) -> Result<serde_json::Value> {
        let detail = self.detail.as_deref().with_context(|| format!("no detail: {self}"))?;
        serde_json::from_str(detail).with_context(|| format!("not JSON: {detail}"))
    }

    /// Returns this fault if it has that SQLSTATE, else an error.
    pub fn expect(self, sqlstate: &str) -> Result<Fault> {
        ensure!(self.sqlstate == sqlstate, "expected SQLSTATE {sqlstate}, got {self}");
        Ok(self)
    }

    /// Returns true if the connection is gone. The outcome of its last statement may then be unknown.
    pub fn is_disconnect(&self) -> bool {
        self.sqlstate.starts_with("08") || self.sqlstate.starts_with("57P")
    }
}

impl From<&postgres::error::DbError> for Fault {
    fn from(error: &postgres::error::DbError) -> Fault {
        let own = |text: Option<&str>| text.map(str::to_owned);
        Fault(Box::new(Fields {
            severity: error.severity().to_owned(),
            sqlstate: error.code().code().to_owned(),
            message: error.message().to_owned(),
            detail: own(error.detail()),
            hint: own(error.hint()),
            schema: own(error.schema()),
            table: own(error.table()),
            column: own(error.column()),
            context: own(error.where_()),
        }))
    }
}

impl From<postgres::Error> for Fault {
    fn from(error: postgres::Error) -> Fault {
        if let Some(error) = error.as_db_error() {
            return Fault::from(error);
        }
        Fault(Box::new(Fields {
            severity: "FATAL".to_owned(),
            sqlstate: "08000".to_owned(),
            message: format!("{:#}", anyhow::Error::from(error)),
            ..Fields::default()
        }))
    }
}

impl Deref for Fault {
    type Target = Fields;
    fn deref(&self) -> &Fields {
        &self.0
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.severity, self.sqlstate, self.message)?;
        for (name, text) in
            [("DETAIL", &self.detail), ("HINT", &self.hint), ("CONTEXT", &self.context)]
        {
            if let Some(text) = text {
                write!(f, "\n{name}: {text}")?;
            }
        }
        Ok(())
    }
}

impl std::error::Error for Fault {}

/// Returns the fault in `result`, which must have that SQLSTATE.
pub fn expect_err<T: fmt::Debug, E: Into<Fault>>(
    result: std::result::Result<T, E>,
    sqlstate: &str,
) -> Result<Fault> {
    match result {
        Ok(value) => bail!("expected SQLSTATE {sqlstate}, but it succeeded: {value:?}"),
        Err(error) => error.into().expect(sqlstate),
    }
}
