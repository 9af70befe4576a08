//! The client in Python, on psycopg 3.

use super::{Language, Program, Programs};
use crate::extension::source_root;
use crate::orm::{self, Runtime};
use anyhow::Result;

pub const LANGUAGE: Language = Language {
    name: "python",
    directory: "python",
    prepare,
    first_worker: FIRST_WORKER,
    is_there: || orm::is_there(LIBRARIES),
};

const FIRST_WORKER: &str = "examples/first_worker.py";

/// What it stands on.
const LIBRARIES: Runtime = Runtime::Python(&["psycopg[binary]==3.3.9"]);

fn prepare() -> Result<Programs> {
    Ok(Programs { worker: program("lab/worker.py")?, first_worker: program(FIRST_WORKER)? })
}

fn program(script: &str) -> Result<Program> {
    let client = source_root().join("clients/python");
    Ok(Program {
        program: orm::fetch(LIBRARIES)?.join("bin/python").into(),
        arguments: vec![client.join(script).into()],
        environment: vec![("PYTHONPATH".into(), client.join("src").into())],
    })
}
