//! What a call costs when there is more of everything: leases, clients, renewals.

use crate::bed::Bed;
use crate::report::Section;
use anyhow::Result;

mod clients;
mod leases;
mod week;

/// The three kinds of growth.
pub fn measure(bed: &Bed) -> Result<Section> {
    let mut section = Section::new("Growth");
    leases::measure(bed, &mut section)?;
    clients::measure(bed, &mut section)?;
    week::measure(bed, &mut section)?;
    Ok(section)
}
