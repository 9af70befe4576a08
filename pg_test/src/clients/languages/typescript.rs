//! The client in TypeScript, on `pg` and on `postgres`.

use super::{Language, Page};
use crate::runtime::{self, Runtime};

pub const ON_PG: Language = Language {
    name: "typescript",
    directory: "typescript",
    is_there: || runtime::is_there(LIBRARIES),
    bring: || Ok(vec![("LIBRARIES", runtime::fetch(LIBRARIES)?.join("node_modules").into())]),
    build: BUILD,
    worker: "node $OUT/worker/worker.mjs --driver pg",
    first_worker: ("examples/first_worker.mjs", "node $OUT/examples/first_worker.mjs"),
    tests: "node $OUT/tests/pg_fence.test.mjs pg",
    tools: &[CHECKERS],
    checks: CHECKS,
    page: Some(Page {
        mark: "ts",
        but: 0,
        file: "page.mts",
        program: [PRELUDE, ""],
        example: ["async () => {\n", "};\n"],
    }),
};

pub const ON_POSTGRES: Language = Language {
    name: "typescript-postgres",
    worker: "node $OUT/worker/worker.mjs --driver postgres",
    first_worker: (ON_PG.first_worker.0, "node $OUT/examples/first_worker_postgres.mjs"),
    tests: "node $OUT/tests/pg_fence.test.mjs postgres",
    checks: &[],
    ..ON_PG
};

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

/// The compiled package, its examples and the worker. The package is built first, because the others import it. Prisma
/// asks for an engine that is not needed here, and would download it.
const BUILD: &str = "
    rm -rf $OUT/../spec $OUT
    cp -r . $OUT
    cp -r ../spec $OUT/..
    rm -rf $OUT/node_modules; ln -s $LIBRARIES $OUT/node_modules
    cd $OUT
    PRISMA_SCHEMA_ENGINE_BINARY=/bin/true CHECKPOINT_DISABLE=1 \
        node $LIBRARIES/prisma/build/index.js generate --schema tests/schema.prisma
    node $LIBRARIES/typescript/bin/tsc --project .
    node $LIBRARIES/typescript/bin/tsc --project worker";

/// A linter and a formatter, and for the packed package whether ES modules and CommonJS find its types like its code,
/// and what its registry requires.
const CHECKS: &[&str] = &[
    r#"echo '{
        "extends": "../tsconfig.json",
        "compilerOptions": {
            "noEmit": true, "allowJs": true, "checkJs": true, "skipLibCheck": true,
            "noUnusedLocals": false, "stripInternal": false, "rootDir": ".."
        },
        "include": ["page.mts", "../examples/*.mjs"]
    }' > $OUT/page/tsconfig.json
    node $LIBRARIES/typescript/bin/tsc --project $OUT/page"#,
    "cd $OUT; npm pack --silent --ignore-scripts",
    "cd $OUT; attw pg_fence-*.tgz --profile node16",
    "cd $OUT; publint pg_fence-*.tgz --strict",
    "biome lint --error-on-warnings",
    "prettier --check src/*.ts tests/*.mts worker/*.mts examples/*.mjs",
];

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
