//! The client in Python, on psycopg 3.

use super::{Language, Program, Programs};
use crate::extension::source_root;
use crate::orm::{self, PYTHON};
use anyhow::Result;
use std::path::PathBuf;

pub const LANGUAGE: Language = Language {
    name: "python",
    directory: "python",
    prepare,
    checks: super::no_checks,
    first_worker: FIRST_WORKER,
    is_there: || orm::is_there(PYTHON),
};

/// The same with asyncio.
pub const ASYNCIO: Language = Language {
    name: "python-asyncio",
    prepare: prepare_asyncio,
    checks: super::no_checks,
    ..LANGUAGE
};

const FIRST_WORKER: &str = "examples/first_worker.py";

fn prepare() -> Result<Programs> {
    let tests = Program {
        arguments: ["-m", "unittest", "discover", "--start-directory"]
            .map(Into::into)
            .into_iter()
            .chain([client().join("tests").into()])
            .collect(),
        ..program("tests")?
    };
    Ok(Programs { tests: Some(tests), ..with_worker("lab/worker.py")? })
}

fn prepare_asyncio() -> Result<Programs> {
    with_worker("lab/async_worker.py")
}

fn with_worker(worker: &str) -> Result<Programs> {
    Ok(Programs { worker: program(worker)?, first_worker: program(FIRST_WORKER)?, tests: None })
}

fn program(script: &str) -> Result<Program> {
    Ok(Program {
        program: orm::fetch(PYTHON)?.join("bin/python").into(),
        arguments: vec![client().join(script).into()],
        environment: vec![
            ("PYTHONPATH".into(), client().join("src").into()),
            // The source stays as it is.
            ("PYTHONDONTWRITEBYTECODE".into(), "1".into()),
        ],
    })
}

fn client() -> PathBuf {
    source_root().join("clients/python")
}
