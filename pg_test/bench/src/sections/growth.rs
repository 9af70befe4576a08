//! The cost of a call when there is more of everything: leases, clients, renewals.

use crate::report::Section;
use crate::workbench::Workbench;
use anyhow::Result;

mod clients;
mod leases;
mod week;

/// The three kinds of growth.
pub fn measure(bench: &Workbench) -> Result<Section> {
    let mut section = Section::new("Growth");
    leases::measure(bench, &mut section)?;
    clients::measure(bench, &mut section)?;
    week::measure(bench, &mut section)?;
    Ok(section)
}
