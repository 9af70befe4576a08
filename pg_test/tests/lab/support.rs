//! What the tests have in common: their ground, their actors, and what holds for many of them.

pub mod bed;
pub mod crowd;
pub mod holes;
pub mod life;
pub mod ways;
