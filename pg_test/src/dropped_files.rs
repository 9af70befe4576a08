//! WAL records of files after the commit that drops them. There are none if every reader and writer of a relation holds
//! its lock. A standby does not have the file any more, and may die of such a record ("WAL contains references to
//! invalid pages").

use crate::cluster::Cluster;
use anyhow::{Context, Result, ensure};
use std::collections::{BTreeSet, HashSet};
use std::io::{self, BufRead, BufReader};
use std::process::Stdio;

/// A segment of the WAL: its timeline, and the two parts of its position.
type Segment = (u32, u32, u32);

/// The WAL records of a server, from `start` (an LSN) on, that change a file whose drop was logged before.
pub fn changed(cluster: &Cluster, timeline: u32, start: &str) -> Result<Vec<String>> {
    let (high, low) = start.split_once('/').context("no LSN")?;
    let part = |text| u32::from_str_radix(text, 16);
    let first = (timeline, part(high)?, part(low)? >> 24);
    let of_timeline = |segment: &Segment| segment.0 == timeline;
    let last = segments(cluster)?.into_iter().filter(of_timeline).max().context("no segment")?;
    let mut program = cluster.install_dir().command("pg_waldump")?;
    program.args(["--start", start, "--path"]).arg(cluster.data().join("pg_wal"));
    // Without names pg_waldump reads the size of the segments from any of them, also from one that is still empty.
    let name = |(timeline, high, low): Segment| format!("{timeline:08X}{high:08X}{low:08X}");
    program.args([name(first), name(last)]).stdin(Stdio::null());
    // pg_waldump always ends with an error, because the WAL ends.
    let mut child = program.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let output = BufReader::new(child.stdout.take().context("no output")?);
    let (mut dropped, mut changed, mut records) = (HashSet::new(), Vec::new(), 0);
    for line in output.lines() {
        let line = line?;
        records += 1;
        if files_changed_by(&line).any(|file| dropped.contains(&file)) {
            changed.push(line.clone());
        }
        dropped.extend(files_dropped_by(&line));
    }
    let last_word = io::read_to_string(child.stderr.take().context("no errors")?)?;
    child.wait()?;
    let nothing = "pg_waldump finds nothing";
    ensure!(records > 0, "{nothing} from {start} of timeline {timeline} on: {last_word}");
    Ok(changed)
}

/// The same for all WAL that exists of its latest timeline.
pub fn changed_lately(cluster: &Cluster) -> Result<Vec<String>> {
    let segments = segments(cluster)?;
    let timeline = segments.last().context("no segment")?.0;
    let first = segments.iter().find(|segment| segment.0 == timeline);
    let (_, high, low) = first.context("no segment")?;
    changed(cluster, timeline, &format!("{high:X}/{:X}", low << 24))
}

fn segments(cluster: &Cluster) -> Result<BTreeSet<Segment>> {
    let mut segments = BTreeSet::new();
    for entry in std::fs::read_dir(cluster.data().join("pg_wal"))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        // The parts of the name are the timeline and two parts of the position: 000000010000000A000000FF.
        let number = |part: usize| u32::from_str_radix(name.get(part * 8..part * 8 + 8)?, 16).ok();
        if let (24, Some(timeline), Some(high), Some(low)) =
            (name.len(), number(0), number(1), number(2))
        {
            segments.insert((timeline, high, low));
        }
    }
    Ok(segments)
}

/// Parses `blkref #0: rel 1663/5/16384 blk 0`: tablespace, database, file.
fn files_changed_by(record: &str) -> impl Iterator<Item = String> + '_ {
    let files = record.split("blkref #").skip(1);
    files.filter_map(|after| Some(after.split_once("rel ")?.1.split(' ').next()?.to_owned()))
}

/// Parses `COMMIT …; rels: base/5/16384 pg_tblspc/16390/PG_15_202209061/5/16391; …`: the same, as paths.
fn files_dropped_by(record: &str) -> impl Iterator<Item = String> + '_ {
    let is_end = record.starts_with("rmgr: Transaction");
    let paths = record.split_once("; rels: ").filter(|_| is_end);
    let paths = paths.and_then(|(_, paths)| paths.split(';').next()).unwrap_or_default();
    paths.split_ascii_whitespace().filter_map(|path| {
        let parts: Vec<&str> = path.split('/').collect();
        match parts[..] {
            ["base", database, file] => Some(format!("1663/{database}/{file}")),
            ["global", file] => Some(format!("1664/0/{file}")),
            ["pg_tblspc", space, _, database, file] => Some(format!("{space}/{database}/{file}")),
            _ => None,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_known_by_their_paths_and_by_their_numbers() {
        let commit = "rmgr: Transaction len (rec/tot): 9/9, tx: 7, lsn: 0/1, prev 0/0, desc: COMMIT 2026-01-01; \
             rels: base/5/16384 pg_tblspc/16390/PG_15_202209061/5/16391 global/1213; inval msgs: catcache 50";
        let dropped: Vec<String> = files_dropped_by(commit).collect();
        assert_eq!(dropped, ["1663/5/16384", "16390/5/16391", "1664/0/1213"]);
        let prune = "rmgr: Heap2 desc: PRUNE …, blkref #0: rel 1663/5/16384 blk 0 FPW, \
             blkref #1: rel 16390/5/16391 fork vm blk 3";
        let changed: Vec<String> = files_changed_by(prune).collect();
        assert_eq!(changed, ["1663/5/16384", "16390/5/16391"]);
        assert_eq!(files_dropped_by(prune).count() + files_changed_by(commit).count(), 0);
    }
}
