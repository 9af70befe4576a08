//! The cost of checking whether a role may take a name: the same calls by a role with all names, and by one with ten
//! prefixes.

use crate::peer::Peer;
use crate::peers::sql::{OURS, Sql};
use crate::plot::Better::Higher;
use crate::race::{Contender, at_once, ratio};
use crate::report::Section;
use crate::workbench::Workbench;
use anyhow::{Context, Result};
use pg_test::Conninfo;

const ALL_NAMES: &str = "all names";
const TEN: &str = "ten prefixes";
/// The least share of the rate that a role with ten prefixes must keep.
const KEPT: f64 = 0.97;

pub fn measure(bench: &Workbench) -> Result<Section> {
    let mut section = Section::new(
        "Prefixes",
        "The same calls by a role that was given all names, and by a role with ten prefixes, of which the last one is \
         that of the names it takes.",
    );
    // Nine prefixes that do not match, and the one that does.
    let ten = (1..10).map(|n| format!("name_of_tenant_{n}:")).chain(["name".to_owned()]).collect();
    let roles = [(ALL_NAMES, vec![String::new()]), (TEN, ten)];
    let roles = roles.map(|(name, prefixes)| role(bench, name, &prefixes));
    let roles = roles.into_iter().collect::<Result<Vec<_>>>()?;
    let many = bench.options.pick(4, 32);
    let mut bars = Vec::new();
    for (what, clients) in [("pairs", 1), ("losing tries", many), ("guards", 1)] {
        let contenders = roles.iter().map(|(conninfo, peer)| match what {
            "pairs" => Contender::of_pairs(&**peer, clients),
            "guards" => guards(conninfo.clone(), peer.name()),
            _ => Contender::of_losing_tries(&**peer, "nameless"),
        });
        let tracks = section.race(
            bench,
            (&format!("{what}, {}", at_once(clients)), "calls/s"),
            &contenders.collect::<Vec<_>>(),
            bench.options.rules(clients).in_short_turns(),
            (ALL_NAMES, "over all names"),
        )?;
        let ten = ratio(&tracks, TEN, ALL_NAMES)?;
        section.at_least(format!("{what}, ten prefixes over all names"), ten, KEPT);
        bars.push((what, ten));
    }
    section.bars(Higher, "prefixes", "a role with ten prefixes over one with all names", bars);
    Ok(section)
}

fn role(
    bench: &Workbench,
    name: &'static str,
    prefixes: &[String],
) -> Result<(Conninfo, Box<dyn Peer>)> {
    let user = name.replace(' ', "_");
    let mut session = bench.connect()?;
    session.run(&format!("CREATE ROLE {user} LOGIN"))?;
    for prefix in prefixes {
        session.run(&format!("SELECT fence_grant('{user}', prefix => '{prefix}')"))?;
    }
    let conninfo = bench.conninfo().user(&user);
    Ok((conninfo.clone(), Sql { name, ..OURS }.at(conninfo)))
}

/// Transactions that only guard a lease of the role.
fn guards(conninfo: Conninfo, role: String) -> Contender<'static> {
    let lease = format!("name of {role}");
    Contender::new(role, move |_| {
        let (mut session, lease) = (conninfo.connect()?, lease.clone());
        let acquire = "SELECT lease_acquire($1, 'bench', '1 h', reclaim => true)";
        let token: Option<i64> = session.one(acquire, &[&lease])?;
        let token = token.context("it should be free, or its own")?;
        let guard = session.prepare("SELECT lease_guard($1, $2)")?;
        Ok(move || {
            session.run("BEGIN")?;
            session.query_one(&guard, &[&lease, &token])?;
            session.run("COMMIT")
        })
    })
}
