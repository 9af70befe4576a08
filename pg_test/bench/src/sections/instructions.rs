//! Instructions that are carried out, counted by valgrind's callgrind: figures without the noise of times.

use crate::plot::{Better, Plot};
use crate::report::{Cell, Section, Table};
use crate::spread::Spread;
use crate::workbench::Workbench;
use anyhow::{anyhow, ensure, Result};
use count::{counted, Part, MARK};
use pg_test::cluster::Builder;
use pg_test::extension::Extension;
use pg_test::prefix::Prefix;
use pg_test::setup::Package;
use pg_test::{majors, process, Cluster, Shutdown};
use std::process::Command;
use std::sync::Arc;
use steps::{chosen, Course, Kind, ADOPTING, COUNTING, LOOP, MINIMAL, NONE, ONE, STEPS};

mod count;
mod steps;

/// Instructions a call of a step.
struct Counted {
    /// The step's place.
    place: usize,
    all: f64,
    /// Those in the extension's own library.
    ours: f64,
}

/// Counts, where valgrind is installed.
pub fn measure(bench: &Workbench) -> Result<Section> {
    let mut section = Section::new("Instructions");
    section.note(
        "Counted by callgrind in a PostgreSQL in single-user mode: instructions in user space for one call, \
         the difference between twice as many calls and as many, over their number. Neither the network nor \
         the disk nor waiting is in it, and nothing is random. \"Lease known\": the session has had to do with the \
         lease before, as a worker with its own; the other lines are of leases that are new to the session.",
    );
    if is_possible(bench, "instructions") {
        if let Err(why) = count_and_show(bench, &mut section) {
            bench.skip("instructions", &why);
        }
    }
    Ok(section)
}

/// What it takes to count for `fence.stats`.
pub fn measure_counting(bench: &Workbench) -> Result<Section> {
    let mut section = Section::new("Counting");
    section.note(
        "What it takes to count for `fence.stats`: the same calls on copies of the same data, by the library and by \
         one that is built without counting. Instructions within that library only: counting calls nothing of the \
         server in a session that has counted before, and what the server does varies with where a row lies.",
    );
    if bench.options.short {
        let why = "left out of the short form, as it takes another build of the extension";
        bench.skip("counting", &anyhow!(why));
    } else if is_possible(bench, "counting") {
        if let Err(why) = compare_counting(bench, &mut section) {
            bench.skip("counting", &why);
        }
    }
    Ok(section)
}

/// Counts what adopting takes beside a guard alone and beside calls of leases granted here, where valgrind is installed.
pub fn count_adopting(bench: &Workbench, section: &mut Section) {
    if !is_possible(bench, "instructions of adopting") {
        return;
    }
    let is_shown =
        |place: &usize| ADOPTING.iter().any(|(kind, name)| STEPS[*place].is(*kind, name));
    let places: Vec<usize> = (0..STEPS.len()).filter(is_shown).collect();
    let counts = lay(bench).and_then(|(cluster, course)| count(bench, &cluster, &course, &places));
    let counts = match counts {
        Ok(counts) => counts,
        Err(why) => return bench.skip("instructions of adopting", &why),
    };
    let mut table = Table::new("instructions (see the section of that name)", &["", "all", "ours"]);
    for (kind, name) in ADOPTING {
        if let Some(count) = counts.iter().find(|c| STEPS[c.place].is(*kind, name)) {
            let title = format!("{name}, {}", kind.unit());
            table.rows.push(vec![
                title.as_str().into(),
                Cell::Number(count.all, 0),
                Cell::Number(count.ours, 0),
            ]);
        }
    }
    section.tables.push(table);
}

fn is_possible(bench: &Workbench, what: &str) -> bool {
    let is_installed = Package::new("valgrind", "/usr/bin/valgrind").is_installed();
    if !is_installed {
        bench.skip(what, &anyhow!("the package valgrind is not installed"));
    }
    is_installed
}

fn count_and_show(bench: &Workbench, section: &mut Section) -> Result<()> {
    let (cluster, course) = lay(bench)?;
    show(section, &count(bench, &cluster, &course, &chosen(bench.options.short))?);
    Ok(())
}

fn compare_counting(bench: &Workbench, section: &mut Section) -> Result<()> {
    let is_shown =
        |place: &usize| COUNTING.iter().any(|(kind, name, _)| STEPS[*place].is(*kind, name));
    let places: Vec<usize> = (0..STEPS.len()).filter(is_shown).collect();
    let (cluster, course) = lay(bench)?;
    let without = uncounted_copy(bench, &cluster)?;
    let with = count(bench, &cluster, &course, &places)?;
    show_counting(section, &with, &count(bench, &without, &course, &places)?);
    Ok(())
}

/// The same data, with a library that does not count for `fence.stats`.
fn uncounted_copy(bench: &Workbench, cluster: &Cluster) -> Result<Cluster> {
    bench.progress("counting: building a library that counts nothing");
    let installation = majors::chosen()?;
    let extension = Extension::build_with_bug(&installation, "no-counting")?;
    let prefix = Arc::new(Prefix::copy(bench.lab.rundir().clone(), &installation)?);
    prefix.install(&extension)?;
    Builder::new(prefix).create_by(|_, data| {
        let mut copy = Command::new("cp");
        process::as_server_user(&mut copy)?;
        process::output_of(copy.arg("-a").arg(cluster.data()).arg(data)).map(drop)
    })
}

/// What counting takes of a step: the difference to a library that does not.
fn show_counting(section: &mut Section, with: &[Counted], without: &[Counted]) {
    let mut table = Table::new(
        "instructions within the library of the extension",
        &["", "counting", "not counting", "difference"],
    );
    for (kind, name, bound) in COUNTING {
        let of = |counts: &[Counted]| {
            counts.iter().find(|c| STEPS[c.place].is(*kind, name)).map(|c| c.ours)
        };
        let (Some(with), Some(without)) = (of(with), of(without)) else { continue };
        let title = format!("{name}, {}", kind.unit());
        table.rows.push(vec![
            title.as_str().into(),
            Cell::Number(with, 0),
            Cell::Number(without, 0),
            Cell::Number(with - without, 1),
        ]);
        if let Some(bound) = bound {
            let aim = format!("counting, {title}: at most {bound} instructions");
            section.at_most(&aim, Spread::of(&[with - without]), *bound);
        }
    }
    section.tables.push(table);
}

/// A stopped server with all that is counted on.
fn lay(bench: &Workbench) -> Result<(Cluster, Course)> {
    bench.progress("instructions: making the tables");
    let calls = bench.options.pick(20, 300);
    // As many sessions as by default: to ask who has a lock, Postgres clears room for all of them, which counts byte by
    // byte where there are many.
    let settings = [
        ("fsync", "off"),
        ("autovacuum", "off"),
        ("max_wal_size", "8GB"),
        ("max_connections", "100"),
        ("max_prepared_transactions", "0"),
    ];
    let builder = settings.iter().fold(bench.lab.builder(), |b, (name, value)| b.set(name, value));
    let cluster = builder.start()?;
    let mut session = cluster.connect("postgres")?;
    session.run("CREATE EXTENSION pg_fence")?;
    let course = Course::lay(bench, &mut session, calls)?;
    drop(session);
    cluster.stop(Shutdown::Fast)?;
    Ok((cluster, course))
}

/// Instructions a call of each step.
fn count(
    bench: &Workbench,
    cluster: &Cluster,
    course: &Course,
    places: &[usize],
) -> Result<Vec<Counted>> {
    bench.progress(&format!("instructions: counting those of {} kinds of calls", places.len()));
    let mut statements = Vec::new();
    for &place in places {
        for part in course.parts(place)? {
            statements.extend(part);
            statements.push(MARK.to_owned());
        }
    }
    let statements: Vec<String> = statements.into_iter().map(|line| line + ";\n").collect();
    let parts = counted(cluster, &statements)?;
    // The mark after a warm-up starts its step's first part; the part between steps is a warm-up.
    ensure!(parts.len() == 3 * places.len() - 1, "{} parts were counted", parts.len());
    let each = |step: &[Part], of: fn(&Part) -> u64| {
        (of(&step[1]) as f64 - of(&step[0]) as f64) / course.calls as f64
    };
    let of_step = |(place, step): (usize, &[Part])| Counted {
        place,
        all: each(step, |part| part.all),
        ours: each(step, |part| part.ours),
    };
    Ok(places.iter().copied().zip(parts.chunks(3)).map(of_step).collect())
}

fn show(section: &mut Section, counts: &[Counted]) {
    let counts: Vec<_> = counts.iter().map(|c| (&STEPS[c.place], c.all)).collect();
    let of = |kind: Kind, name: &str| {
        counts.iter().find(|(s, _)| s.kind == kind && s.name == name).map(|(_, n)| *n)
    };
    let tables = [
        (
            Kind::Calls,
            "a call on a lease, one of many in a statement",
            ["", "instructions", "beyond the loop's", "over plpgsql's update"],
            LOOP,
            "plpgsql: update of a row",
        ),
        (
            Kind::Statements,
            "a call on a lease, a prepared statement and a transaction of its own",
            ["", "instructions", "beyond SELECT 1's", "over an update's"],
            ONE,
            "update of a row",
        ),
        (
            Kind::Rows,
            "a row of an UPDATE of many",
            ["", "instructions", "added", "added, over minimal C"],
            NONE,
            MINIMAL,
        ),
        (
            Kind::OneRow,
            "an UPDATE of one row, a prepared statement and a transaction of its own",
            ["", "instructions", "added", "added, over minimal C"],
            NONE,
            MINIMAL,
        ),
    ];
    for (kind, title, head, floor, unit) in tables {
        let (floor, unit) = (of(kind, floor).unwrap_or(0.0), of(kind, unit).unwrap_or(f64::NAN));
        let mut table = Table::new(title, &head);
        let mut bars = Vec::new();
        for (step, count) in counts.iter().copied().filter(|(step, _)| step.kind == kind) {
            let beyond = count - floor;
            table.rows.push(vec![
                step.name.into(),
                Cell::Number(count, 0),
                Cell::Number(beyond, 0),
                Cell::Number(beyond / (unit - floor), 2),
            ]);
            bars.push((step.name.to_owned(), Spread::of(&[count])));
        }
        if table.rows.is_empty() {
            continue;
        }
        section.tables.push(table);
        let file = match kind {
            Kind::Statements => "instructions_leases",
            Kind::Rows => "instructions_fence",
            Kind::Calls | Kind::OneRow => continue,
        };
        let title = format!("instructions: {title}");
        section.plots.push(Plot { better: Better::Lower, file: file.to_owned(), title, bars });
    }
    let added = |kind, name| Some(of(kind, name)? - of(kind, NONE)?);
    for (name, bound) in [("pg_fence, unbound", 1.05), ("pg_fence, bound to one lease", 1.15)] {
        if let (Some(ours), Some(minimal)) = (added(Kind::Rows, name), added(Kind::Rows, MINIMAL)) {
            let aim = format!(
                "{name}, instructions a row: added over the minimal C trigger's, at most {bound}"
            );
            section.at_most(&aim, Spread::of(&[ours / minimal]), bound);
        }
    }
    for (kind, what, bound) in
        [(Kind::Rows, "a row", 5_000.0), (Kind::OneRow, "a statement", 8_500.0)]
    {
        if let Some(ours) = added(kind, "pg_fence, unbound") {
            let aim = format!("pg_fence, unbound, instructions added {what}: at most {bound}");
            section.at_most(&aim, Spread::of(&[ours]), bound);
        }
    }
}
