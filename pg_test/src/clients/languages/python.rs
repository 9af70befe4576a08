//! The client in Python, on psycopg 3.

use super::{Language, Page, Variables};
use crate::runtime::{self, PYTHON, Runtime};
use crate::setup::{self, Package};
use crate::source_tree::source_root;
use anyhow::Result;

pub const LANGUAGE: Language = Language {
    name: "python",
    directory: "python",
    is_there: || runtime::is_there(PYTHON),
    bring,
    build: "",
    worker: "$PYTHON -W error worker/worker.py",
    first_worker: ("examples/first_worker.py", "$PYTHON -W error examples/first_worker.py"),
    tests: "$PYTHON -W error -m unittest discover --start-directory tests",
    tools: TOOLS,
    checks: CHECKS,
    page: Some(Page {
        mark: "python",
        but: 0,
        file: "page.py",
        program: [PRELUDE, ""],
        example: ["", ""],
    }),
};

/// The client with asyncio.
pub const ASYNCIO: Language = Language {
    name: "python-asyncio",
    worker: "$PYTHON -W error worker/worker.py --asyncio",
    tests: "",
    checks: &[],
    ..LANGUAGE
};

/// The asynchronous client on the system's libpq, which has no asynchronous cancel request before version 17.
pub const ASYNCIO_ON_LIBPQ: Language = Language {
    name: "python-asyncio-libpq",
    bring: || {
        setup::ensure(&[Package::new("libpq5", "/usr/lib/*/libpq.so.5")])?;
        let mut variables = bring()?;
        variables.push(("PSYCOPG_IMPL", "python".into()));
        Ok(variables)
    },
    ..ASYNCIO
};

fn bring() -> Result<Variables> {
    Ok(vec![
        ("PYTHON", runtime::fetch(PYTHON)?.join("bin/python").into()),
        ("PYTHONPATH", source_root().join("clients/python/src").into()),
        ("PYTHONDONTWRITEBYTECODE", "1".into()),
    ])
}

/// Tools that lint the client, build its package, and check it as PyPI does; and the type checker.
const TOOLS: &[Runtime] = &[
    Runtime::Python(&[
        "ruff==0.17.6",
        "build==1.6.1",
        "setuptools==84.2.1",
        "twine==7.0.0",
        "check-wheel-contents==0.6.3",
    ]),
    Runtime::Node(&["pyright@1.1.414"]),
];

const CHECKS: &[&str] = &[
    "ruff check --no-cache .",
    "ruff format --check --no-cache .",
    "pyright --pythonpath $PYTHON --project .",
    "ln -sfn $PYTHONPATH/pg_fence $OUT/page/pg_fence
     cd $OUT/page; pyright --pythonpath $PYTHON page.py",
    // The build leaves files in the source directory.
    "rm -rf $OUT/source $OUT/dist; cp -r . $OUT/source
     python -m build --no-isolation --outdir $OUT/dist $OUT/source",
    "twine check --strict $OUT/dist/*",
    "check-wheel-contents $OUT/dist",
    "python -m zipfile --extract $OUT/dist/*.whl $OUT/wheel
     cmp $OUT/wheel/*/licenses/LICENSE ../../LICENSE",
];

/// What its examples use without defining it, under strict types. Each begins anew, and asyncpg has no types.
const PRELUDE: &str = "\
# pyright: strict, reportDuplicateImport=false, reportMissingTypeStubs=false
# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
import threading
from datetime import timedelta
import asyncpg
import psycopg
import pg_fence
fence = pg_fence.Fence('')
conn = psycopg.connect('')
lease = first = second = fence.lease('').__enter__()
";
