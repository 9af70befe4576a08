//! The measurements, a section each.

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

/// A subject that can be measured by itself.
pub struct Subject {
    /// Its name on the command line.
    pub name: &'static str,
    /// Whether it is measured unless others are asked for.
    pub by_default: bool,
    pub measure: fn(&Workbench) -> Result<Section>,
}

const fn subject(name: &'static str, measure: fn(&Workbench) -> Result<Section>) -> Subject {
    Subject { name, by_default: true, measure }
}

/// All of them, in the order of the report.
pub const ALL: &[Subject] = &[
    subject("uncontended", uncontended::measure),
    subject("contended", contended::measure),
    subject("jobs", jobs::measure),
    subject("keep", keep::measure),
    subject("handover", handover::measure),
    subject("death", death::measure),
    subject("fence", fence::measure),
    subject("growth", growth::measure),
    subject("startup", startup::measure),
    subject("capacity", capacity::measure),
    subject("prefixes", prefixes::measure),
    subject("databases", databases::measure),
    subject("lite", lite::measure),
];
