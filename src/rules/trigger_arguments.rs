//! The arguments of a trigger that calls `fenced`: the meaning of each position, and the default of a missing or empty
//! one. The trigger interprets the words.

/// The number of arguments that a trigger may have.
pub const MOST: usize = 6;

/// `fenced(fence_column, mode, lease, deadline, 'verify', 'update,delete')`, in the database's encoding.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TriggerArguments<'a> {
    /// The fence column's name.
    pub fence_column: &'a [u8],
    /// How tokens are compared, and who fills the fence column.
    pub mode: &'a [u8],
    /// The template of the leases that guard the rows.
    pub lease: Option<&'a [u8]>,
    /// The deadline column of a table with row leases.
    pub deadline: Option<&'a [u8]>,
    /// Given if the trigger checks the row again after all other triggers.
    pub verify: Option<&'a [u8]>,
    /// The events chosen for the fence, separated by commas; `None` for all events that its kind of fence checks.
    pub events: Option<&'a [u8]>,
}

impl<'a> TriggerArguments<'a> {
    /// Reads the arguments in their order. The caller refuses any beyond the last known one.
    pub fn new(mut given: impl Iterator<Item = &'a [u8]>) -> Self {
        let mut next = || given.next().filter(|argument| !argument.is_empty());
        let (fence_column, mode, lease, deadline) = (next(), next(), next(), next());
        // A holder of a row often writes it several times with one token.
        let usual: &[u8] = if deadline.is_some() { b"monotonic" } else { b"strict" };
        TriggerArguments {
            fence_column: fence_column.unwrap_or(b"fence"),
            mode: mode.unwrap_or(usual),
            lease,
            deadline,
            verify: next(),
            events: next(),
        }
    }

    /// Returns true if a managed row may be created without its lease.
    pub fn has_unfenced_insert(&self) -> bool {
        self.mode == b"managed"
            && self.events.is_some_and(|events| words(events).all(|e| e != b"insert"))
    }

    /// Returns true if all chosen events exist.
    pub fn knows_its_events(&self) -> bool {
        const KNOWN: [&[u8]; 4] = [b"insert", b"update", b"delete", b"truncate"];
        self.events.is_none_or(|events| words(events).all(|event| KNOWN.contains(&event)))
    }
}

fn words(events: &[u8]) -> impl Iterator<Item = &[u8]> {
    events.split(|byte| *byte == b',')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read<'a>(given: &[&'a str]) -> TriggerArguments<'a> {
        TriggerArguments::new(given.iter().copied().map(str::as_bytes))
    }

    #[test]
    fn what_is_left_out_or_empty_has_its_default() {
        let none = TriggerArguments {
            fence_column: b"fence",
            mode: b"strict",
            lease: None,
            deadline: None,
            verify: None,
            events: None,
        };
        let all = TriggerArguments {
            fence_column: b"token",
            mode: b"managed",
            lease: Some(b"order:{id}"),
            deadline: None,
            verify: Some(b"verify"),
            events: Some(b"update,delete"),
        };
        assert_eq!(read(&[]), none);
        let row = TriggerArguments {
            mode: b"monotonic",
            deadline: Some(b"held_until"),
            ..TriggerArguments::new(std::iter::empty())
        };
        assert_eq!(read(&["", "", "", "", "", ""]), none);
        assert_eq!(read(&["token", "managed", "order:{id}", "", "verify", "update,delete"]), all);
        assert_eq!(read(&["", "", "", "held_until"]), row);
    }

    #[test]
    fn a_managed_fence_whose_events_lack_insert_lets_rows_be_created() {
        for (mode, events, free, known) in [
            ("managed", "", false, true),
            ("managed", "update,delete", true, true),
            ("managed", "insert,update", false, true),
            ("managed", "truncate", true, true),
            ("strict", "update", false, true),
            ("strict", "inserts", false, false),
            ("managed", "update, insert", true, false),
            ("managed", ",", true, false),
        ] {
            let read = read(&["", mode, "", "", "", events]);
            let got = (read.has_unfenced_insert(), read.knows_its_events());
            assert_eq!(got, (free, known), "{mode} {events}");
        }
    }
}
