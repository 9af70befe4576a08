//! The cost of looking whether a role may take a name: the same calls by a role that was given all names, and by one
//! with ten prefixes.

use super::uncontended::{find, pairs};
use crate::peer::Peer;
use crate::peers::ours;
use crate::peers::sql::Sql;
use crate::plot::{Better, Plot};
use crate::race::{self, Contender, Op};
use crate::report::{Section, Table};
use crate::workbench::Workbench;
use anyhow::{ensure, Context, Result};

const ALL_NAMES: &str = "all names";
const TEN: &str = "ten prefixes";
/// The least share of its rate that a role with ten prefixes is to keep.
const KEPT: f64 = 0.97;
/// Held throughout by somebody else.
const TAKEN: &str = "nameless";

pub fn measure(bench: &Workbench) -> Result<Section> {
    let mut section = Section::new("Prefixes");
    section.note(
        "The same calls by a role that was given all names, and by a role with ten prefixes, of which the last one is \
         that of the names it takes.",
    );
    let roles = [role(bench, ALL_NAMES, &["".to_owned()])?, role(bench, TEN, &ten())?];
    let many = bench.options.pick(4, 32);
    let taken: i64 =
        bench.connect()?.one("SELECT coalesce(lease_acquire($1, ttl => '1 h'), 0)", &[&TAKEN])?;
    ensure!(taken > 0, "the lease should be free");
    let mut plot = Vec::new();
    for (what, clients) in [("pairs", 1), ("losing tries", many), ("guards", 1)] {
        bench.progress(&format!("prefixes: {what}"));
        let contenders: Vec<Contender> = roles
            .iter()
            .map(|role| match what {
                "pairs" => pairs(role, clients),
                "guards" => guards(role),
                _ => losing(role),
            })
            .collect();
        let tracks = race::run(&contenders, bench.options.rules(clients).in_short_turns())?;
        let all_names = find(&tracks, ALL_NAMES)?;
        let title = format!("{what}, {}", race::at_once(clients));
        section.tables.push(Table::of_rates(
            title,
            "calls/s",
            &tracks,
            all_names,
            "over all names",
        ));
        let ten = find(&tracks, TEN)?.ratio_to(all_names);
        let aim = format!("{what}, ten prefixes over all names: at least {KEPT}");
        section.at_least(&aim, ten, KEPT);
        plot.push((what.to_owned(), ten));
    }
    section.plots.push(Plot {
        better: Better::Higher,
        file: "prefixes".to_owned(),
        title: "a role with ten prefixes over one with all names".to_owned(),
        bars: plot,
    });
    let release = format!("SELECT lease_release('{TAKEN}', {taken})");
    bench.connect()?.run(&release)?;
    Ok(section)
}

/// Nine that are looked at in vain, and that of the names.
fn ten() -> Vec<String> {
    (1..10).map(|n| format!("name_of_tenant_{n}:")).chain(["name".to_owned()]).collect()
}

fn role(bench: &Workbench, name: &'static str, prefixes: &[String]) -> Result<Sql> {
    let user = name.replace(' ', "_");
    let mut session = bench.connect()?;
    session.run(&format!("CREATE ROLE {user} LOGIN"))?;
    for prefix in prefixes {
        session.run(&format!("SELECT fence_grant('{user}', prefix => '{prefix}')"))?;
    }
    let (conninfo, statements) = (bench.conninfo().user(&user), ours::statements(""));
    Ok(Sql { name, conninfo, statements })
}

fn losing(role: &Sql) -> Contender<'_> {
    Contender::new(role.name, move |client| {
        let mut locker = role.join(client)?;
        Ok(Box::new(move || {
            ensure!(locker.acquire(TAKEN)?.is_none(), "the lease should be taken");
            Ok(())
        }) as Op)
    })
}

/// Transactions that guard a lease of the role's and do nothing else.
fn guards(role: &Sql) -> Contender<'_> {
    Contender::new(role.name, move |_| {
        let mut session = role.conninfo.connect()?;
        let lease = format!("name of {}", role.name);
        let acquire = "SELECT lease_acquire($1, 'bench', '1 h', reclaim => true)";
        let token: Option<i64> = session.one(acquire, &[&lease])?;
        let token = token.context("it should be free, or its own")?;
        let guard = session.prepare("SELECT lease_guard($1, $2)")?;
        Ok(Box::new(move || {
            session.run("BEGIN")?;
            session.query_one(&guard, &[&lease, &token])?;
            session.run("COMMIT")?;
            Ok(())
        }) as Op)
    })
}
