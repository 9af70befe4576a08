//! Unmodified migration tools, run by the command: one migrates, the others wait and find nothing to do. One that was
//! frozen is refused, and its DDL is rolled back.

use pg_test::clients::command::fixture::{CommandFixture, freeze, is_gone, thaw};
use pg_test::runtime::{self, PYTHON, Runtime};
use pg_test::source_tree::source_root;
use pg_test::{Harness, Result, ensure, harness_test};

const ALEMBIC: Runtime =
    Runtime::Python(&["alembic==1.20.1", "sqlalchemy==2.1.9", "psycopg[binary]==3.3.9"]);

/// A migration tool, and the table in which it records what it has done.
struct Tool {
    libraries: Runtime,
    /// The directory of its project, below `orm`.
    project: &'static str,
    /// Returns the shell command for a revision, run from the directory of the libraries' programs.
    migrates_to: fn(&str) -> String,
    table: &'static str,
    /// Returns true if the output says that there is nothing to do.
    has_nothing: fn(&str) -> bool,
    /// The output of a tool that detects by itself that another run has migrated meanwhile.
    finds_itself_late: &'static str,
}

const DJANGO: Tool = Tool {
    libraries: PYTHON,
    project: "django_migrations",
    migrates_to: |revision| {
        format!(
            "$BIN/python manage.py migrate shop {}",
            match revision {
                "first" => "0001",
                _ => "0002",
            }
        )
    },
    table: "django_migrations",
    has_nothing: |said| said.contains("No migrations to apply"),
    // Django adds a row, and detects nothing.
    finds_itself_late: "does not speak for",
};

const ALEMBIC_TOOL: Tool = Tool {
    libraries: ALEMBIC,
    project: "alembic_migrations",
    migrates_to: |revision| format!("$BIN/alembic upgrade {revision}"),
    table: "alembic_version",
    has_nothing: |said| !said.contains("Running upgrade"),
    // Alembic updates the row of the version that it began from.
    finds_itself_late: "0 found",
};

#[harness_test(slow)]
fn of_djangos_one_migrates_and_a_frozen_one_is_refused(harness: &Harness) -> Result<()> {
    one_migrates(harness, &DJANGO)
}

#[harness_test(slow)]
fn of_alembics_one_migrates_and_a_frozen_one_is_refused(harness: &Harness) -> Result<()> {
    one_migrates(harness, &ALEMBIC_TOOL)
}

fn one_migrates(harness: &Harness, tool: &Tool) -> Result<()> {
    let libraries = runtime::fetch(tool.libraries)?;
    let fixture = CommandFixture::new(harness)?;
    let mut admin = fixture.admin()?;
    admin.run(&format!("GRANT ALL ON SCHEMA public TO {}", fixture.servers.role))?;
    let orm = source_root().join("pg_test/orm");
    let script = |variables: &str, revision: &str| {
        format!(
            "cd {}; export PYTHONDONTWRITEBYTECODE=1 PYTHONPATH={} BIN={}/bin {variables}; exec {}",
            orm.join(tool.project).display(),
            orm.display(),
            libraries.display(),
            (tool.migrates_to)(revision),
        )
    };
    fixture.run("migrations --ttl 1m --wait 5m", &script("", "first"))?.ends_with(0)?;
    admin.run(&format!("SELECT fence_protect('{}', lease => 'migrations')", tool.table))?;
    // Without the command the tool cannot record its work, so nothing is done.
    let bare = format!("unset PGOPTIONS; {}", script("COLUMN=bare", "second"));
    let ended = fixture.run("other", &bare)?.ended()?;
    ensure!(ended.status.code() != Some(0) && ended.stderr.contains("fence"), "{ended:?}");

    let frozen =
        fixture.run("migrations --ttl 3s", &script("STANDS=stands COLUMN=late", "second"))?;
    let (renewer, pid) = (frozen.renewer()?, fixture.pid("stands")?);
    for one in [frozen.supervisor(), renewer, pid] {
        freeze(one)?;
    }
    let others =
        [(); 2].map(|()| fixture.run("migrations --ttl 1m --wait 5m", &script("", "second")));
    let mut nothing = 0;
    for other in others {
        let ended = other?.ends_with(0)?;
        nothing += i32::from((tool.has_nothing)(&format!("{}{}", ended.stdout, ended.stderr)));
    }
    ensure!(nothing == 1, "{nothing} of two found nothing to do");
    // The program resumes first: it is in the middle of its transaction, and continues to its end.
    fixture.touch("go")?;
    thaw(pid)?;
    is_gone(pid)?;
    thaw(renewer)?;
    thaw(frozen.supervisor())?;
    let ended = frozen.ended()?;
    ensure!(ended.status.code() != Some(0), "{ended:?}");
    let said = ["does not speak for", "stale", tool.finds_itself_late];
    ensure!(said.iter().any(|words| ended.stderr.contains(words)), "{ended:?}");
    let columns = "SELECT string_agg(attname, ' ' ORDER BY attnum) FROM pg_attribute \
                   WHERE attrelid = 'shop_customer'::regclass AND attnum > 0 AND NOT attisdropped";
    ensure!(admin.text(columns)?.as_deref() == Some("id name"), "{:?}", admin.text(columns)?);
    Ok(())
}
