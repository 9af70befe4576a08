//! The client in Python, on psycopg 3.

use super::{Language, Program};
use crate::extension::source_root;
use crate::orm::{self, Runtime};
use anyhow::Result;

pub const LANGUAGE: Language = Language {
    name: "python",
    prepare: || program(&["lab/worker.py"]),
    is_there: || orm::is_there(LIBRARIES),
};

/// What it stands on.
const LIBRARIES: Runtime = Runtime::Python(&["psycopg[binary]==3.3.9"]);

fn program(arguments: &[&str]) -> Result<Program> {
    let home = orm::fetch(LIBRARIES)?;
    let client = source_root().join("clients/python");
    let (script, others) = arguments.split_first().expect("a script");
    let mut arguments = vec![client.join(script).into_os_string()];
    arguments.extend(others.iter().map(Into::into));
    let environment = vec![("PYTHONPATH".into(), client.join("src").into())];
    Ok(Program { program: home.join("bin/python").into(), arguments, environment })
}
