//! The client in Python, on psycopg 3.

use super::{Check, Language, Program, Programs};
use crate::process::output_of;
use crate::runtime::{self, PYTHON, Runtime};
use crate::setup::{self, Package};
use crate::source_tree::{source_root, target_dir};
use anyhow::Result;
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

pub const LANGUAGE: Language = Language {
    name: "python",
    directory: "python",
    prepare,
    checks,
    first_worker: FIRST_WORKER,
    is_there: || runtime::is_there(PYTHON),
};

/// The client with asyncio.
pub const ASYNCIO: Language = Language {
    name: "python-asyncio",
    prepare: prepare_asyncio,
    checks: super::no_checks,
    ..LANGUAGE
};

/// The asynchronous client on the system's libpq, which has no asynchronous cancel request before version 17.
pub const ASYNCIO_ON_LIBPQ: Language =
    Language { name: "python-asyncio-libpq", prepare: prepare_asyncio_on_libpq, ..ASYNCIO };

/// Tools that lint the client, build its package, and check it as PyPI does.
const TOOLS: Runtime = Runtime::Python(&[
    "ruff==0.17.6",
    "build==1.6.1",
    "setuptools==84.2.1",
    "twine==7.0.0",
    "check-wheel-contents==0.6.3",
]);

/// The type checker, with its own rules.
const PYRIGHT: Runtime = Runtime::Node(&["pyright@1.1.414"]);

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
    Ok(Programs { tests: Some(tests), ..with_worker("worker/worker.py")? })
}

fn prepare_asyncio() -> Result<Programs> {
    let mut programs = with_worker("worker/worker.py")?;
    programs.worker.arguments.push("--asyncio".into());
    Ok(programs)
}

fn prepare_asyncio_on_libpq() -> Result<Programs> {
    setup::ensure(&[Package::new("libpq5", "/usr/lib/*/libpq.so.5")])?;
    let mut programs = prepare_asyncio()?;
    for program in [&mut programs.worker, &mut programs.first_worker] {
        program.environment.push(("PSYCOPG_IMPL".into(), "python".into()));
    }
    Ok(programs)
}

fn checks() -> Result<Vec<Check>> {
    let tools = runtime::fetch(TOOLS)?.join("bin");
    let tool = |name: &'static str, arguments: &[&str]| {
        let mut command = Command::new(tools.join(name));
        command.args(arguments).env("PYTHONDONTWRITEBYTECODE", "1");
        Check { name, command }
    };
    let mut ruff = tool("ruff", &["check", "--no-cache"]);
    ruff.command.arg(client());
    let mut format = tool("ruff", &["format", "--check", "--no-cache"]);
    format.command.arg(client());
    let pyright = |project: PathBuf| -> Result<Command> {
        let mut pyright = Command::new("node");
        pyright.arg(runtime::fetch(PYRIGHT)?.join("node_modules/pyright/index.js"));
        pyright.arg("--pythonpath").arg(runtime::fetch(PYTHON)?.join("bin/python"));
        pyright.arg("--project").arg(project);
        Ok(pyright)
    };
    // The build leaves files in the source directory.
    let home = target_dir().join("clients/python");
    if home.exists() {
        fs::remove_dir_all(&home)?;
    }
    fs::create_dir_all(&home)?;
    output_of(Command::new("cp").arg("-r").arg(client()).arg(home.join("source")))?;
    let dist = home.join("dist");
    let mut build = tool("python", &["-m", "build", "--no-isolation", "--outdir"]);
    output_of(build.command.arg(&dist).arg(home.join("source")))?;
    let built = fs::read_dir(&dist)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    let mut twine = tool("twine", &["check", "--strict"]);
    twine.command.args(&built);
    let mut contents = tool("check-wheel-contents", &[]);
    contents.command.arg(&dist);
    let mut licence = tool("python", &["-c", HAS_LICENCE]);
    licence.command.args(&built).arg(source_root().join("LICENSE"));
    let page = Check { name: "the page", command: pyright(examples_of_the_page(&home)?)? };
    let pyright = Check { name: "pyright", command: pyright(client())? };
    Ok(vec![ruff, format, pyright, page, twine, contents, licence])
}

/// The code in its README, as a program under strict types.
fn examples_of_the_page(home: &Path) -> Result<PathBuf> {
    let code = super::examples("python", "python", 0)?.concat();
    let dir = home.join("page");
    fs::create_dir_all(&dir)?;
    fs::write(dir.join("page.py"), format!("{PRELUDE}{code}"))?;
    let rules = json!({
        "include": ["page.py"], "extraPaths": [client().join("src")], "typeCheckingMode": "strict",
        // Each example begins anew, and asyncpg has no types.
        "reportDuplicateImport": false, "reportMissingTypeStubs": false, "reportUnknownLambdaType": false,
        "reportUnknownMemberType": false, "reportUnknownVariableType": false,
        "reportUnknownArgumentType": false,
    });
    fs::write(dir.join("pyrightconfig.json"), rules.to_string())?;
    Ok(dir)
}

const PRELUDE: &str = "
import threading
from datetime import timedelta
import asyncpg
import psycopg
import pg_fence
fence = pg_fence.Fence('')
conn = psycopg.connect('')
lease = first = second = fence.lease('').__enter__()
";

/// Checks that the wheel contains the project's licence.
const HAS_LICENCE: &str = "
import sys, zipfile
(wheel,) = [path for path in sys.argv if path.endswith('.whl')]
files = zipfile.ZipFile(wheel)
(name,) = [name for name in files.namelist() if name.endswith('licenses/LICENSE')]
assert files.read(name) == open(sys.argv[-1], 'rb').read(), 'another licence'
";

fn with_worker(worker: &str) -> Result<Programs> {
    Ok(Programs { worker: program(worker)?, first_worker: program(FIRST_WORKER)?, tests: None })
}

fn program(script: &str) -> Result<Program> {
    Ok(Program {
        program: runtime::fetch(PYTHON)?.join("bin/python").into(),
        arguments: vec!["-W".into(), "error".into(), client().join(script).into()],
        environment: vec![
            ("PYTHONPATH".into(), client().join("src").into()),
            // The source directory must not change.
            ("PYTHONDONTWRITEBYTECODE".into(), "1".into()),
        ],
    })
}

fn client() -> PathBuf {
    source_root().join("clients/python")
}
