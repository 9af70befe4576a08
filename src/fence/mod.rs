//! The fence: the trigger that lets a write land only with a token that is not stale.

mod binding;
mod declared;
mod trigger;

pub use declared::{audit, protect};
pub use trigger::{fenced, listen};
