//! The measurements, in sections.

use crate::report::Section;
use crate::workbench::Workbench;
use anyhow::Result;

mod capacity;
mod contended;
mod databases;
pub mod death;
mod fence;
mod growth;
mod handover;
mod jobs;
mod keep;
mod lite;
mod prefixes;
mod startup;
mod uncontended;

/// Measures a subject.
pub type Measure = fn(&Workbench) -> Result<Section>;

/// All sections with their names on the command line, in the order of the report.
pub const ALL: &[(&str, Measure)] = &[
    ("uncontended", uncontended::measure),
    ("contended", contended::measure),
    ("jobs", jobs::measure),
    ("keep", keep::measure),
    ("handover", handover::measure),
    ("death", death::measure),
    ("fence", fence::measure),
    ("growth", growth::measure),
    ("startup", startup::measure),
    ("capacity", capacity::measure),
    ("prefixes", prefixes::measure),
    ("databases", databases::measure),
    ("lite", lite::measure),
];
