//! The client in TypeScript, on `pg` and on `postgres`.

use super::{Check, Language, Program, Programs};
use crate::process::output_of;
use crate::runtime::{self, Runtime};
use crate::source_tree::{source_root, target_dir};
use anyhow::{Context, Result};
use serde_json::json;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

pub const ON_PG: Language = Language {
    name: "typescript",
    directory: "typescript",
    prepare: || prepare("pg", FIRST_WORKER),
    checks,
    first_worker: FIRST_WORKER,
    is_there: || runtime::is_there(LIBRARIES),
};

pub const ON_POSTGRES: Language = Language {
    name: "typescript-postgres",
    directory: "typescript",
    prepare: || prepare("postgres", "examples/first_worker_postgres.mjs"),
    checks: super::no_checks,
    first_worker: FIRST_WORKER,
    is_there: || runtime::is_there(LIBRARIES),
};

const FIRST_WORKER: &str = "examples/first_worker.mjs";

/// Its dependencies, its compiler, and the ORMs of its tests.
const LIBRARIES: Runtime = Runtime::Node(&[
    "typescript@7.0.2",
    "@types/node@20.19.43",
    "@types/pg@8.23.1",
    "pg@8.23.1",
    "postgres@3.4.9",
    "@prisma/adapter-pg@7.10.1",
    "@prisma/client@7.10.0",
    "drizzle-orm@0.45.4",
    "kysely@0.28.18",
    "prisma@7.10.1",
    "sequelize@6.37.8",
    "typeorm@1.1.1",
]);

/// Tools that check the package as npm would receive it, and that lint its source and check its format.
const CHECKERS: Runtime = Runtime::Node(&[
    "@arethetypeswrong/cli@0.18.5",
    "@biomejs/biome@2.6.8",
    "prettier@3.10.1",
    "publint@0.3.25",
]);

/// Checks the source by a linter and a formatter, and the packed package: whether ES modules and CommonJS find its
/// types like its code, and what its registry requires.
fn checks() -> Result<Vec<Check>> {
    let home = build()?;
    let mut npm = Command::new("npm");
    output_of(npm.args(["pack", "--silent", "--ignore-scripts"]).current_dir(&home))?;
    let packed = format!("pg_fence-{}.tgz", env!("CARGO_PKG_VERSION"));
    let bin = runtime::fetch(CHECKERS)?.join("node_modules/.bin");
    let check = |name, tool: &str, arguments: &[&str]| {
        let mut command = Command::new(bin.join(tool));
        command.arg(&packed).args(arguments).current_dir(&home);
        Check { name, command }
    };
    let source = source_root().join("clients/typescript");
    let mut format = Command::new(bin.join("prettier"));
    let sources = ["src/*.ts", "tests/*.mts", "worker/*.mts", "examples/*.mjs"];
    format.arg("--check").args(sources).current_dir(&source);
    let mut lint = Command::new(bin.join("biome"));
    lint.args(["lint", "--error-on-warnings"]).current_dir(source);
    let mut page = Command::new("node");
    page.arg(home.join("node_modules/typescript/bin/tsc"));
    page.arg("--project").arg(examples_of_the_page(&home)?);
    Ok(vec![
        Check { name: "the page", command: page },
        check("attw", "attw", &["--profile", "node16"]),
        check("publint", "publint", &["--strict"]),
        Check { name: "biome", command: lint },
        Check { name: "prettier", command: format },
    ])
}

/// The code in its README, and the first workers, as programs under strict types.
fn examples_of_the_page(home: &Path) -> Result<PathBuf> {
    let code = super::examples("typescript", "ts", 0)?;
    let code: String = code.iter().map(|code| format!("async () => {{\n{code}}};\n")).collect();
    let dir = home.join("page");
    fs::create_dir_all(&dir)?;
    fs::write(dir.join("page.mts"), format!("{PRELUDE}{code}"))?;
    let rules = json!({
        "extends": "../tsconfig.json",
        "compilerOptions": {
            "noEmit": true, "allowJs": true, "checkJs": true, "skipLibCheck": true,
            "noUnusedLocals": false, "stripInternal": false, "rootDir": "..",
        },
        "include": ["page.mts", "../examples/*.mjs"],
    });
    fs::write(dir.join("tsconfig.json"), rules.to_string())?;
    Ok(dir)
}

/// The names that the examples use without defining them.
const PRELUDE: &str = r#"
import { setTimeout as sleep } from "node:timers/promises";
import { sql as raws } from "drizzle-orm";
import type { NodePgDatabase } from "drizzle-orm/node-postgres";
import { bigint, pgTable, text } from "drizzle-orm/pg-core";
import { sql, type Kysely } from "kysely";
import pg from "pg";
import type { Model, Sequelize } from "sequelize";
import type { DataSource } from "typeorm";
import { Fence, options, type Lease } from "pg_fence/pg";
import type { PrismaClient } from "../tests/prisma/index.js";
declare const [pool, fence]: [pg.Pool, Fence];
declare const [lease, first, second]: [Lease, Lease, Lease];
declare const [dataSource, sequelize, order]: [DataSource, Sequelize, Model];
declare const kysely: Kysely<{ orders: { id: string; status: string } }>;
declare const [drizzle, prisma]: [NodePgDatabase, PrismaClient];
declare const [id, token, stop]: [string, string, AbortController];
const { raw } = raws;
const orders = pgTable("orders", { id: bigint({ mode: "number" }), status: text() });
"#;

fn prepare(driver: &str, first_worker: &str) -> Result<Programs> {
    let home = build().context("the client in TypeScript cannot be built")?;
    let program = |script: &str, arguments: &[&str]| Program {
        program: "node".into(),
        arguments: std::iter::once(home.join(script).into_os_string())
            .chain(arguments.iter().map(Into::into))
            .collect(),
        environment: Vec::new(),
    };
    Ok(Programs {
        worker: program("worker/worker.mjs", &["--driver", driver]),
        first_worker: program(first_worker, &[]),
        tests: Some(program("tests/pg_fence.test.mjs", &[driver])),
    })
}

/// The compiled package, its examples and the worker, in their own directory in the target directory.
pub fn build() -> Result<PathBuf> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
    let libraries = runtime::fetch(LIBRARIES)?.join("node_modules");
    let home = target_dir().join("clients/typescript");
    let (client, built) = (source_root().join("clients/typescript"), home.join("built"));
    // The vectors that its tests play are beside it.
    copy(&source_root().join("clients/spec"), &target_dir().join("clients/spec"))?;
    if !copy(&client, &home)? && built.exists() {
        return Ok(home);
    }
    // Files that the client no longer has would be compiled, too.
    fs::remove_dir_all(&home)?;
    copy(&client, &home)?;
    let link = home.join("node_modules");
    match fs::remove_file(&link) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.into()),
        _ => symlink(&libraries, &link)?,
    }
    // Prisma asks for an engine that is not needed here, and would download it.
    let mut prisma = Command::new("node");
    prisma.arg(libraries.join("prisma/build/index.js")).args([
        "generate",
        "--schema",
        "tests/schema.prisma",
    ]);
    prisma.env("PRISMA_SCHEMA_ENGINE_BINARY", "/bin/true").env("CHECKPOINT_DISABLE", "1");
    output_of(prisma.current_dir(&home))?;
    // The package is built first, because the others import the built package.
    for project in [".", "worker"] {
        let mut tsc = Command::new("node");
        tsc.arg(libraries.join("typescript/bin/tsc")).args(["--project", project]);
        output_of(tsc.current_dir(&home))?;
    }
    fs::write(built, "")?;
    Ok(home)
}

/// Copies new and changed files, and returns true if there were any.
fn copy(from: &Path, to: &Path) -> Result<bool> {
    fs::create_dir_all(to)?;
    let mut copied = false;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        if entry.file_type()?.is_dir() {
            copied |= copy(&source, &target)?;
            continue;
        }
        let text = fs::read(&source)?;
        if fs::read(&target).ok().as_ref() != Some(&text) {
            fs::write(&target, text)?;
            copied = true;
        }
    }
    Ok(copied)
}
