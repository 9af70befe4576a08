//! Which entry of a full list makes room for the next one, so that a crowd of entries by one owner does not drive out those
//! of others.

use std::collections::HashMap;

/// An entry that is kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    /// How new it is: each has a greater number than those before.
    pub number: u64,
    /// The owner of the entry.
    pub owner: u32,
}

/// The place that is written next: one that is free; else that of the oldest entry of those whose owners have more than a
/// quarter of all places; else that of the oldest. None where there is no place.
pub fn next_to_go(places: &[Option<Entry>]) -> Option<usize> {
    if let Some(free) = places.iter().position(Option::is_none) {
        return Some(free);
    }
    let mut number_of: HashMap<u32, usize> = HashMap::new();
    for entry in places.iter().flatten() {
        *number_of.entry(entry.owner).or_default() += 1;
    }
    let has_too_many = |owner| 4 * number_of[&owner] > places.len();
    let all = places.iter().flatten().enumerate();
    all.min_by_key(|(_, entry)| (!has_too_many(entry.owner), entry.number)).map(|(n, _)| n)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Puts in so many entries of an owner.
    fn put(places: &mut [Option<Entry>], owner: u32, count: usize) {
        for _ in 0..count {
            let last = places.iter().flatten().map(|entry| entry.number).max().unwrap_or(0);
            let place = next_to_go(places).expect("there are places");
            places[place] = Some(Entry { number: last + 1, owner });
        }
    }

    #[test]
    fn who_has_more_than_a_quarter_drives_out_its_own() {
        let mut places = [None; 16];
        // One alone has all of it. The others come in, up to a quarter each, at its cost; of two that have more, the older
        // entries go. Whatever they do, the third keeps its quarter.
        for (owner, count, shares) in [
            (0, 40, [16, 0, 0]),
            (1, 3, [13, 3, 0]),
            (0, 100, [13, 3, 0]),
            (2, 4, [9, 3, 4]),
            (0, 100, [9, 3, 4]),
            (2, 4, [8, 3, 5]),
            (1, 1, [8, 4, 4]),
        ] {
            put(&mut places, owner, count);
            let has = |owner| places.iter().flatten().filter(|entry| entry.owner == owner).count();
            assert_eq!([0, 1, 2].map(has), shares, "{count} more of {owner}");
        }
        for owner in [2, 0, 2] {
            put(&mut places, owner, 100);
        }
        assert_eq!(places.iter().flatten().filter(|entry| entry.owner == 1).count(), 4);
    }

    #[test]
    fn where_nobody_has_more_than_a_quarter_the_oldest_goes() {
        let mut places = [None; 8];
        (0..24).for_each(|n| put(&mut places, n % 4, 1));
        let mut kept = places.map(|entry| entry.map_or(0, |entry| entry.number));
        kept.sort_unstable();
        assert_eq!(kept, [17, 18, 19, 20, 21, 22, 23, 24]);
        assert_eq!(next_to_go(&[]), None);
    }
}
