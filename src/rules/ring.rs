//! A ring of the latest entries in memory that several processes share, without a lock.
//!
//! Each entry belongs to somebody, and a role with more than a quarter of a full ring writes over entries of its own: a
//! crowd of entries by one does not drive out those of others.
//!
//! A writer draws a ticket, which says how new its entry is, looks for a cell and marks it as being written:
//! nobody else writes there meanwhile, and a reader that finds the mark changed while it copied throws its copy away. A
//! process that is stopped in the middle keeps nobody up: others do without that one cell.

use std::collections::HashMap;
use std::sync::atomic::{fence, AtomicU64, Ordering};

/// How many words a cell takes: its mark, whose the entry is and how long, and the entry.
pub const CELL_WORDS: usize = 128;
/// The most bytes that an entry can have.
pub const ENTRY_MAX: usize = (CELL_WORDS - HEAD) * 8;

/// The words before the entry: mark; owner and length.
const HEAD: usize = 2;
/// How often to look again at a cell that another process is writing, or for another one that is free.
const LOOKS: u32 = 100;

/// A ring over shared words, which are all zero at first.
#[derive(Clone, Copy)]
pub struct Ring<'a> {
    tickets: &'a AtomicU64,
    cells: &'a [AtomicU64],
    /// Entries with earlier tickets are over.
    first: u64,
}

/// The mark of a cell in which the entry with this ticket is being written: odd.
const fn being_written(ticket: u64) -> u64 {
    2 * ticket + 1
}

/// The mark of a cell which has the entry with this ticket: even, and not 0.
const fn written(ticket: u64) -> u64 {
    2 * ticket + 2
}

/// Does a cell with this mark have an entry that is complete?
const fn is_written(mark: u64) -> bool {
    mark != 0 && mark.is_multiple_of(2)
}

impl<'a> Ring<'a> {
    /// `tickets` counts the entries; `cells` has `CELL_WORDS` for each entry that is kept; entries before the ticket
    /// `first` are over.
    pub fn new(tickets: &'a AtomicU64, cells: &'a [AtomicU64], first: u64) -> Self {
        Ring { tickets, cells, first }
    }

    /// How many entries are kept.
    pub fn size(&self) -> usize {
        self.cells.len() / CELL_WORDS
    }

    /// How many entries there have been.
    pub fn tickets(&self) -> u64 {
        self.tickets.load(Ordering::Acquire)
    }

    /// Adds an entry of this owner. False where it is not kept: it is too long, the ring has no cell or other processes
    /// take each that it finds.
    pub fn put(&self, owner: u32, entry: &[u8]) -> bool {
        if entry.len() > ENTRY_MAX {
            return false;
        }
        let ticket = self.tickets.fetch_add(1, Ordering::AcqRel);
        let Some(cell) = self.claim(ticket) else { return false };
        cell[1].store(u64::from(owner) << 32 | entry.len() as u64, Ordering::Relaxed);
        for (word, bytes) in cell[HEAD..].iter().zip(entry.chunks(8)) {
            let mut padded = [0; 8];
            padded[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_le_bytes(padded), Ordering::Relaxed);
        }
        cell[0].store(written(ticket), Ordering::Release);
        true
    }

    /// The entries that are there, newest first.
    pub fn entries(&self) -> Vec<Vec<u8>> {
        let mut found: Vec<_> = self.each_cell().filter_map(|cell| self.entry(cell)).collect();
        found.sort_unstable_by_key(|(mark, _)| std::cmp::Reverse(*mark));
        found.into_iter().map(|(_, entry)| entry).collect()
    }

    /// The mark and the entry of a cell. None where it has none, or it is not written yet.
    fn entry(&self, cell: &[AtomicU64]) -> Option<(u64, Vec<u8>)> {
        for _ in 0..LOOKS {
            let mark = cell[0].load(Ordering::Acquire);
            if is_written(mark) {
                let entry = copy(cell);
                // What was copied is the entry only if nobody has begun to write over it.
                fence(Ordering::Acquire);
                if cell[0].load(Ordering::Relaxed) == mark {
                    return (mark >= written(self.first)).then_some((mark, entry));
                }
            } else if mark == 0 {
                return None;
            }
            std::thread::yield_now();
        }
        None
    }

    fn each_cell(&self) -> impl Iterator<Item = &'a [AtomicU64]> {
        self.cells.chunks_exact(CELL_WORDS)
    }

    /// Finds a cell for this ticket's entry, and marks it as being written by this process alone.
    fn claim(&self, ticket: u64) -> Option<&'a [AtomicU64]> {
        for _ in 0..LOOKS {
            let (cell, found) = self.next_to_go()?;
            let mine = being_written(ticket);
            // Another process may have been faster.
            let claimed =
                cell[0].compare_exchange(found, mine, Ordering::Acquire, Ordering::Relaxed);
            if claimed.is_ok() {
                // A reader that sees a word of this entry sees the mark, too.
                fence(Ordering::Release);
                return Some(cell);
            }
        }
        None
    }

    /// The cell that is written next, and its mark: one that is free; else the oldest of those whose owners have more than
    /// a quarter of the ring; else the oldest.
    fn next_to_go(&self) -> Option<(&'a [AtomicU64], u64)> {
        let mut taken = Vec::with_capacity(self.size());
        let mut number_of = HashMap::new();
        for cell in self.each_cell() {
            let mark = cell[0].load(Ordering::Acquire);
            if mark == 0 || is_written(mark) && mark < written(self.first) {
                return Some((cell, mark));
            }
            // Where somebody has begun to write here since, the mark is another one, too.
            let owner = cell[1].load(Ordering::Relaxed) >> 32;
            if is_written(mark) {
                *number_of.entry(owner).or_insert(0) += 1;
                taken.push((cell, mark, owner));
            }
        }
        let has_too_many = |owner: u64| 4 * number_of[&owner] > self.size();
        let goes = taken.iter().min_by_key(|(_, mark, owner)| (!has_too_many(*owner), *mark))?;
        Some((goes.0, goes.1))
    }
}

/// The entry in a cell. Its words may be of several, where it is being written over.
fn copy(cell: &[AtomicU64]) -> Vec<u8> {
    let length = (cell[1].load(Ordering::Relaxed) as u32 as usize).min(ENTRY_MAX);
    let words = &cell[HEAD..HEAD + length.div_ceil(8)];
    let mut bytes: Vec<u8> =
        words.iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect();
    bytes.truncate(length);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    fn words(cells: usize) -> (AtomicU64, Vec<AtomicU64>) {
        (AtomicU64::new(0), (0..cells * CELL_WORDS).map(|_| AtomicU64::new(0)).collect())
    }

    #[test]
    fn the_latest_are_kept_newest_first() {
        let (tickets, cells) = words(3);
        let ring = Ring::new(&tickets, &cells, 0);
        assert!(ring.entries().is_empty());
        for n in 0..5u8 {
            assert!(ring.put(1, &vec![n; usize::from(n) * 7]));
        }
        assert_eq!(ring.entries(), [vec![4; 28], vec![3; 21], vec![2; 14]]);
    }

    #[test]
    fn what_is_over_is_not_shown_and_its_cells_are_free() {
        let (tickets, cells) = words(3);
        let ring = Ring::new(&tickets, &cells, 0);
        for n in 0..4u8 {
            ring.put(1, &[n]);
        }
        let ring = Ring::new(&tickets, &cells, ring.tickets());
        assert!(ring.entries().is_empty());
        ring.put(2, b"a");
        ring.put(1, b"b");
        ring.put(1, b"c");
        assert_eq!(ring.entries(), [b"c", b"b", b"a"]);
    }

    #[test]
    fn the_longest_entry_fits_and_a_longer_one_is_not_kept() {
        let (tickets, cells) = words(1);
        let ring = Ring::new(&tickets, &cells, 0);
        assert!(ring.put(u32::MAX, &[7; ENTRY_MAX]));
        assert!(!ring.put(1, &[8; ENTRY_MAX + 1]));
        assert_eq!(ring.entries(), [vec![7; ENTRY_MAX]]);
    }

    #[test]
    fn a_ring_without_places_keeps_nothing() {
        let (tickets, cells) = words(0);
        let ring = Ring::new(&tickets, &cells, 0);
        assert!(!ring.put(1, b"x") && ring.entries().is_empty());
    }

    /// How many entries each of three owners has; an entry begins with its owner.
    fn shares(ring: &Ring) -> [usize; 3] {
        let entries = ring.entries();
        std::array::from_fn(|owner| entries.iter().filter(|e| usize::from(e[0]) == owner).count())
    }

    #[test]
    fn who_has_more_than_a_quarter_drives_out_its_own() {
        let (tickets, cells) = words(16);
        let ring = Ring::new(&tickets, &cells, 0);
        let put = |owner: u8, number: usize| {
            (0..number).for_each(|_| assert!(ring.put(owner.into(), &[owner])));
        };
        // One alone has all of it. The others come in, up to a quarter each, at its cost.
        put(0, 40);
        assert_eq!(shares(&ring), [16, 0, 0]);
        put(1, 3);
        put(0, 100);
        assert_eq!(shares(&ring), [13, 3, 0]);
        put(2, 4);
        put(0, 100);
        assert_eq!(shares(&ring), [9, 3, 4]);
        // Of two that have more, the older entries go.
        put(2, 4);
        assert_eq!(shares(&ring), [8, 3, 5]);
        put(1, 1);
        assert_eq!(shares(&ring), [8, 4, 4]);
        // Whatever they do, the third keeps its quarter.
        put(2, 100);
        put(0, 100);
        put(2, 100);
        assert_eq!(shares(&ring)[1], 4);
    }

    #[test]
    fn where_nobody_has_more_than_a_quarter_the_oldest_goes() {
        let (tickets, cells) = words(8);
        let ring = Ring::new(&tickets, &cells, 0);
        for n in 0..24u8 {
            ring.put((n % 4).into(), &[n]);
        }
        assert_eq!(ring.entries(), (16..24u8).rev().map(|n| vec![n]).collect::<Vec<_>>());
    }

    #[test]
    fn a_process_that_stopped_while_it_wrote_costs_one_place() {
        let (tickets, cells) = words(2);
        let ring = Ring::new(&tickets, &cells, 0);
        assert!(ring.put(1, b"a"));
        // The second one stops in the middle.
        let stopped = tickets.fetch_add(1, Ordering::AcqRel);
        let cell = ring.claim(stopped).expect("free");
        assert_eq!(ring.entries(), [b"a"]);
        for entry in [b"c", b"d"] {
            assert!(ring.put(1, entry));
            assert_eq!(ring.entries(), [entry]);
        }
        // It goes on: its entry is older.
        cell[0].store(written(stopped), Ordering::Release);
        assert!(ring.put(1, b"f"));
        assert_eq!(ring.entries(), [b"f", b"d"]);
    }

    #[test]
    fn where_every_cell_is_being_written_nothing_is_kept() {
        let (tickets, cells) = words(1);
        let ring = Ring::new(&tickets, &cells, 0);
        assert!(ring.claim(0).is_some());
        assert!(!ring.put(1, b"x") && ring.entries().is_empty());
    }

    /// An entry whose bytes are all the same, and whose length goes by them.
    fn entry(n: u8) -> Vec<u8> {
        vec![n; 4 * usize::from(n) + 1]
    }

    #[test]
    fn no_reader_sees_a_torn_entry() {
        let (tickets, cells) = words(8);
        let ring = Ring::new(&tickets, &cells, 0);
        let over = AtomicBool::new(false);
        let seen = std::thread::scope(|threads| {
            let read = || {
                let mut seen = 0;
                while !over.load(Ordering::Relaxed) {
                    for found in ring.entries() {
                        assert_eq!(found, entry(found[0]), "torn");
                        seen += 1;
                    }
                }
                seen
            };
            let readers = [threads.spawn(read), threads.spawn(read)];
            let write = |from: u8| {
                for n in 0..40_000u32 {
                    ring.put(u32::from(from) + n % 3, &entry(from + (n % 100) as u8));
                }
            };
            let writers = [threads.spawn(move || write(0)), threads.spawn(move || write(100))];
            writers.into_iter().for_each(|w| w.join().unwrap());
            over.store(true, Ordering::Relaxed);
            readers.into_iter().map(|r| r.join().unwrap()).sum::<u32>()
        });
        assert!(seen > 0);
        assert_eq!(ring.tickets(), 80_000);
        assert_eq!(ring.entries().len(), 8);
    }
}
