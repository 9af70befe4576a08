//! The cost of a call as the number of leases, clients or renewals grows.

use crate::report::Section;
use crate::workbench::Workbench;
use anyhow::Result;

mod clients;
mod leases;
mod week;

/// The three kinds of growth.
pub fn measure(bench: &Workbench) -> Result<Section> {
    let mut section = Section::new(
        "Growth",
        "Leases: one client calls for one of so many leases at random, half of them held by somebody \
         else, half of them free; they were made by lease_acquire itself. Beside them a plain table of as \
         many rows, as wide, with the same key, for what grows in PostgreSQL anyhow.",
    );
    leases::measure(bench, &mut section)?;
    clients::measure(bench, &mut section)?;
    week::measure(bench, &mut section)?;
    Ok(section)
}
