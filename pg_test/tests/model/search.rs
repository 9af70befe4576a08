//! The search of the models, and what the models share.

use pg_test::rules::grant::{Grant, Mode, Tokens};
use pg_test::rules::locks::{Lock, LockMode, LockStep};
use pg_test::rules::{Instant, Token};
use stateright::{Checker, HasDiscoveries, Model};
use std::fmt::Debug;
use std::hash::Hash;

/// Defines `Protections`, one field each. The extension has them all (`Protections::ALL`); a test can take one away.
macro_rules! protections {
    ($($(#[$said:meta])* $name:ident),* $(,)?) => {
        #[derive(Clone, Copy, Debug)]
        pub struct Protections {
            $($(#[$said])* pub $name: bool),*
        }

        impl Protections {
            /// All protections, as in the extension.
            pub const ALL: Protections = Protections { $($name: true),* };

            /// Returns all protections but one.
            pub fn without(take_away: fn(&mut Protections)) -> Protections {
                let mut protections = Protections::ALL;
                take_away(&mut protections);
                protections
            }
        }
    };
}

/// A property of a model: that no state notes this violation.
macro_rules! never {
    ($model:ident, $name:expr) => {
        Property::<$model>::always($name, |_, state: &State| state.violation != Some($name))
    };
}

/// Defines tests, one in each row: the name, and its searches.
macro_rules! searches {
    ($($name:ident => $($search:expr),+;)*) => {
        $(
            #[test]
            fn $name() {
                $($search;)+
            }
        )*
    };
}

pub(crate) use {never, protections, searches};

/// Returns an open-ended grant with one token.
pub fn grant(slot: i32, mode: Mode, token: Token) -> Grant {
    Grant {
        slot,
        mode,
        tokens: Tokens::new(token, &[]),
        closing: None,
        closed_here: false,
        expires_at: Instant::LATEST,
        abandoned: false,
        adopted: None,
    }
}

/// A lock held by a transaction: the object, the slot and the mode.
pub type Held = (Lock, i32, LockMode);

/// Returns true if the lock does not conflict with those of others.
pub fn is_free<'a>(mut others: impl Iterator<Item = &'a Held>, want: LockStep, slot: i32) -> bool {
    !others.any(|(lock, on, mode)| {
        (*lock, *on) == (want.lock, slot) && want.mode.conflicts_with(*mode)
    })
}

/// Counts an event. Returns `None` if its limit is reached.
pub fn once_more(count: &mut u8, limit: u8) -> Option<()> {
    *count += 1;
    (*count <= limit).then_some(())
}

/// Searches all states within the bounds and must find no violation.
pub fn holds<M>(model: M)
where
    M: Model + Send + Sync + 'static,
    M::State: Clone + Debug + Hash + PartialEq + Send + Sync,
    M::Action: Clone + Debug + PartialEq + Send + Sync,
{
    let started = std::time::Instant::now();
    let checker = model.checker().threads(2).spawn_bfs().join();
    println!("{} states, {:?}", checker.unique_state_count(), started.elapsed());
    checker.assert_properties();
}

/// Searches until that property breaks, which must happen, and prints the path.
pub fn breaks<M>(model: M, property: &'static str)
where
    M: Model + Send + Sync + 'static,
    M::State: Clone + Debug + Hash + PartialEq + Send + Sync,
    M::Action: Clone + Debug + PartialEq + Send + Sync,
{
    let found = HasDiscoveries::AllOf([property].into());
    let checker = model.checker().finish_when(found).spawn_bfs().join();
    let states = checker.unique_state_count();
    let path = checker.discovery(property);
    let path = path.unwrap_or_else(|| panic!("{states} states, and \"{property}\" is not broken"));
    println!("\"{property}\" is broken by ({states} states):");
    for action in path.into_actions() {
        println!("    {action:?}");
    }
}
