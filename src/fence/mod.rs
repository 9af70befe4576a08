//! The fence: the trigger that lets a write land only with a token that is not stale.

mod binding;
mod trigger;

pub use trigger::{fenced, listen};
