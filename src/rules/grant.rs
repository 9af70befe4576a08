//! The grants of a lease: whether a new one can be made, and which tokens speak for the lease.

use crate::{Epoch, Instant, Token};

/// Number of renewal tokens that a grant remembers.
pub const RENEWALS_KEPT: usize = 16;

/// Which grants of a lease may exist at the same time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// One grant at a time.
    Exclusive,
    /// Any number of grants, but none of another mode.
    Shared,
    /// Up to this number of grants.
    Slots(i32),
}

/// The tokens of one grant: that of the acquire, and those of its latest renewals. They are values, not a range,
/// because tokens of other leases lie between them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tokens {
    first: Token,
    renewed: [Token; RENEWALS_KEPT],
    kept: usize,
}

impl Tokens {
    /// The tokens of a grant with these renewals, the oldest first. Only the latest 16 are kept.
    pub fn new(first: Token, renewals: &[Token]) -> Self {
        let latest = &renewals[renewals.len().saturating_sub(RENEWALS_KEPT)..];
        let mut renewed = [Token::BEFORE_ALL; RENEWALS_KEPT];
        renewed[..latest.len()].copy_from_slice(latest);
        Tokens { first, renewed, kept: latest.len() }
    }

    /// The token of the acquire.
    pub fn first(&self) -> Token {
        self.first
    }

    /// The tokens of the latest renewals, oldest first.
    pub fn renewed(&self) -> &[Token] {
        &self.renewed[..self.kept]
    }

    /// The token drawn last, which is the greatest: each renewal draws a greater one.
    pub fn latest(&self) -> Token {
        self.renewed().last().copied().unwrap_or(self.first)
    }

    /// Returns true if the token is one of the grant's.
    pub fn contains(&self, token: Token) -> bool {
        token == self.first || self.renewed().contains(&token)
    }

    /// Adds a renewal; if there are more than 16, forgets the oldest.
    pub fn renew(&self, token: Token) -> Self {
        let mut next = *self;
        if next.kept == RENEWALS_KEPT {
            next.renewed.rotate_left(1);
            next.kept -= 1;
        }
        next.renewed[next.kept] = token;
        next.kept += 1;
        next
    }
}

/// The columns of a grant's row that the rules use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grant {
    /// The number of the grant within its lease, from 0; an exclusive grant has 0.
    pub slot: i32,
    /// The mode that the acquire requested.
    pub mode: Mode,
    /// The tokens of the acquire and of the renewals.
    pub tokens: Tokens,
    /// The closing token of a grant that was released, revoked or replaced.
    pub closing: Option<Token>,
    /// True if the deciding transaction itself has closed the grant.
    pub closed_here: bool,
    /// The deadline, at which an open grant is over.
    pub expires_at: Instant,
    /// True if the grant ends with the session that acquired it, and that session has ended.
    pub abandoned: bool,
    /// For an adopted grant, which has the number of another lock service: the latest epoch at its adoption. `None` for
    /// a grant made here.
    pub adopted: Option<Epoch>,
}

/// The state of a grant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Granted and not over.
    Held,
    /// Over by its deadline.
    Expired,
    /// Over because the session that it was bound to has ended.
    Abandoned,
    /// Closed by a release, a revocation or another grant.
    Free,
}

impl Grant {
    /// The state of the grant at this time.
    pub fn phase(&self, now: Instant) -> Phase {
        match self.closing {
            Some(_) => Phase::Free,
            None if now >= self.expires_at => Phase::Expired,
            None if self.abandoned => Phase::Abandoned,
            None => Phase::Held,
        }
    }

    /// Returns true if the token is one of the grant's, including the closing token.
    pub fn has(&self, token: Token) -> bool {
        self.tokens.contains(token) || self.closing == Some(token)
    }

    /// The greatest token that the grant has had.
    pub fn greatest(&self) -> Token {
        self.closing.unwrap_or(Token::BEFORE_ALL).max(self.tokens.latest())
    }

    /// Returns true if the token speaks for the lease: the grant is held, the token is one of its tokens, and its
    /// latest token was drawn in this epoch, the present one. A closing token speaks until the end of the transaction
    /// that drew it, if the grant's own tokens did.
    pub fn speaks(&self, token: Token, now: Instant, epoch: Epoch) -> bool {
        self.names(token, now) && self.outlived(epoch)
    }

    /// Returns true if only a new epoch keeps the token from speaking. A renewal helps then, or another adoption.
    pub fn awaits_renewal(&self, token: Token, now: Instant, epoch: Epoch) -> bool {
        self.names(token, now) && !self.outlived(epoch)
    }

    /// Returns true if the token is a valid one of the grant, whatever the epoch.
    fn names(&self, token: Token, now: Instant) -> bool {
        match self.closing {
            Some(closing) => self.closed_here && token == closing && self.has_closing_token(),
            None => self.phase(now) == Phase::Held && self.tokens.contains(token),
        }
    }

    /// Returns true if the grant was made or renewed in the present epoch. An adopted number is not of this sequence,
    /// so the epoch of the adoption is compared.
    fn outlived(&self, epoch: Epoch) -> bool {
        match self.adopted {
            Some(under) => under == epoch,
            None => epoch.includes(self.tokens.latest()),
        }
    }

    /// Returns true if the grant was released or revoked. A grant that another one ended (`ends`) is closed with its
    /// own latest token; an adopted one with the greater token that ended it.
    fn has_closing_token(&self) -> bool {
        let latest = self.tokens.latest();
        match self.adopted {
            Some(_) => self.closing == Some(latest),
            None => self.closing.is_some_and(|closing| closing > latest),
        }
    }

    /// Returns true if this token may renew the grant, provided that it was made here. The epoch does not matter:
    /// renewing is how a holder continues in a new one.
    pub fn renewable(&self, token: Token, now: Instant) -> bool {
        self.phase(now) == Phase::Held && self.tokens.contains(token)
    }

    /// Decides about a release with this token. The epoch does not matter, as for a renewal.
    pub fn release(&self, token: Token, now: Instant) -> Release {
        match self.closing {
            Some(closing)
                if self.closed_here
                    && self.has_closing_token()
                    && (token == closing || self.tokens.contains(token)) =>
            {
                Release::Again(closing)
            }
            None if self.renewable(token, now) => Release::Close,
            _ => Release::Lost,
        }
    }
}

/// The decision about a release.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Release {
    /// The grant is current: draw a closing token and close it.
    Close,
    /// This transaction has closed the grant already, with this token.
    Again(Token),
    /// The token is not one of a current grant.
    Lost,
}

/// A grant of the lease that exists when another is requested.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExistingGrant {
    /// The columns of the grant's row.
    pub grant: Grant,
    /// True if the caller has the holder's name and role.
    pub mine: bool,
    /// True if an open transaction guards the grant, or is writing its row. Its slot is occupied then, even if the grant
    /// is over.
    pub guarded: bool,
}

impl ExistingGrant {
    /// A grant that another transaction is making. It occupies its slot until that transaction ends, which may roll it
    /// back, so its number of slots is not in force.
    pub fn in_the_making(slot: i32, mode: Mode) -> ExistingGrant {
        let grant = Grant {
            slot,
            mode,
            tokens: Tokens::new(Token::BEFORE_ALL, &[]),
            closing: None,
            closed_here: false,
            expires_at: Instant::EARLIEST,
            abandoned: false,
            adopted: None,
        };
        ExistingGrant { grant, mine: false, guarded: true }
    }
}

/// Adds the grants whose rows other transactions are writing to those of the committed rows, for a request in this mode.
///
/// * If the committed grant in its slot is over, the row takes that grant's place.
/// * If that grant is live, the row counts beside it if its mode is another. Otherwise the row is a renewal, an end or a
///   successor of that grant, and occupies no further slot.
/// * A row whose grant is being ended by another grant excludes no mode. It only occupies its slot, because the slot is
///   locked.
pub fn add_under_way(
    existing: &mut Vec<ExistingGrant>,
    under_way: &[Grant],
    mode: Mode,
    now: Instant,
) {
    // Slots that have an entry of a grant under way. Another version of it in another mode gets an entry of its own.
    let mut making: Vec<i32> = Vec::new();
    for grant in under_way {
        let slot = grant.slot;
        let is_replaced = grant.closing.is_some() && !grant.has_closing_token();
        let mode = if is_replaced { mode } else { grant.mode };
        // The request could not be granted in this slot anyway.
        let is_beyond = is_replaced && matches!(mode, Mode::Slots(n) if slot >= n);
        let one = ExistingGrant { guarded: !is_beyond, ..ExistingGrant::in_the_making(slot, mode) };
        let is_live = |seen: &ExistingGrant| seen.grant.phase(now) == Phase::Held;
        let is_known = making.contains(&slot);
        let counts = |seen: &ExistingGrant| seen.grant.mode == mode && (is_known || is_live(seen));
        if existing.iter().any(|seen| seen.grant.slot == slot && counts(seen)) {
            continue;
        }
        match existing.iter_mut().find(|seen| seen.grant.slot == slot && !is_live(seen)) {
            Some(seen) if !is_known => *seen = one,
            _ => existing.push(one),
        }
        making.push(slot);
    }
}

/// The request of an acquire.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AcquireRequest {
    /// The requested mode.
    pub mode: Mode,
    /// True if the grant may replace the caller's own.
    pub reclaim: bool,
}

/// The decision about the adoption of a token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Adopt {
    /// The token is current, and nothing is to be done.
    Current,
    /// The token is current, but of an earlier epoch: it must be adopted again.
    OfEarlierEpoch,
    /// The token is current, in whichever epoch, but another holder has adopted it.
    OtherHolder,
    /// The token is greater than all tokens that the name has had.
    Greater,
    /// The token is smaller than one that the name has had, or it was released or revoked.
    Stale,
    /// The name has a grant that was made here.
    GrantedHere,
}

/// The names of the recorded holder and of the adopting one, as given by each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Holders<'a> {
    /// The holder of the row; `None` if its adoption named none.
    pub recorded: Option<&'a [u8]>,
    /// The holder of this call; `None` if it names none.
    pub adopting: Option<&'a [u8]>,
}

impl Holders<'_> {
    /// Returns true if both have names, and these differ. A call without a name counts as the recorded holder's, whose
    /// transactions need not repeat it.
    fn differ(&self) -> bool {
        matches!((self.recorded, self.adopting), (Some(one), Some(other)) if one != other)
    }
}

/// Decides about a token of another lock service, by the rows of the name.
pub fn adopt(existing: &[Grant], token: Token, epoch: Epoch, holders: Holders) -> Adopt {
    let mut found = Adopt::Greater;
    for grant in existing {
        let (Some(under), latest) = (grant.adopted, grant.tokens.latest()) else {
            return Adopt::GrantedHere;
        };
        found = match grant.closing {
            None if token == latest && holders.differ() => Adopt::OtherHolder,
            None if token == latest && under == epoch => Adopt::Current,
            None if token == latest => Adopt::OfEarlierEpoch,
            // A greater token may have ended this grant, announcing the adoption that now follows.
            _ if token > latest && token >= grant.greatest() => Adopt::Greater,
            _ => Adopt::Stale,
        };
    }
    found
}

/// The decision about an acquire.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Acquire {
    /// The lease is granted in this slot. With `reclaim`, the caller's own grants in other slots end.
    Grant {
        /// The slot to write.
        slot: i32,
    },
    /// Existing grants exclude the new one.
    Taken {
        /// The time at which the grants will have expired; `None` if only the end of a transaction can help.
        until: Option<Instant>,
    },
    /// Grants with another number of slots are held; an exclusive grant counts as one slot.
    SlotsDiffer {
        /// The number of slots in force.
        live: i32,
    },
    /// The name has adopted tokens.
    Adopted,
}

/// Decides whether another grant can be made beside the existing ones. `now` must have been read after the locks were
/// taken; otherwise a caller that waited for them could take an expired grant for a held one.
pub fn admit(existing: &[ExistingGrant], request: &AcquireRequest, now: Instant) -> Acquire {
    if existing.iter().any(|s| s.grant.adopted.is_some()) {
        return Acquire::Adopted;
    }
    let live = |s: &ExistingGrant| s.grant.phase(now) == Phase::Held;
    let yields = |s: &ExistingGrant| request.reclaim && s.mine && live(s) && !s.guarded;
    // A guarded grant occupies its slot even if it is over.
    let occupied = |s: &&ExistingGrant| (live(s) || s.guarded) && !yields(s);
    let taken = |by: &dyn Fn(&ExistingGrant) -> bool, all: bool| {
        let ends = existing
            .iter()
            .filter(occupied)
            .filter(|s| by(s))
            .map(|s| if s.guarded { Instant::LATEST } else { s.grant.expires_at });
        let until = if all { ends.max() } else { ends.min() };
        Acquire::Taken { until: until.filter(|at| *at < Instant::LATEST) }
    };
    if request.reclaim && existing.iter().any(|s| s.mine && live(s) && s.guarded) {
        // Reclaiming must not add a second grant beside the caller's first.
        return Acquire::Taken { until: None };
    }
    if let Some(requested) = number(request.mode) {
        let in_force = |s: &ExistingGrant| number(s.grant.mode).filter(|_| live(s) && !yields(s));
        if let Some(live) = existing.iter().filter_map(in_force).find(|n| *n != requested) {
            return Acquire::SlotsDiffer { live };
        }
    }
    // A shared request conflicts with other modes only. So does a request for slots, up to their number.
    let excludes =
        |s: &ExistingGrant| request.mode == Mode::Exclusive || s.grant.mode != request.mode;
    if existing.iter().filter(occupied).any(excludes) {
        return taken(&excludes, true);
    }
    match request.mode {
        Mode::Slots(n)
            if existing.iter().filter(occupied).count() >= usize::try_from(n).unwrap_or(0) =>
        {
            taken(&|_| true, false)
        }
        Mode::Exclusive => Acquire::Grant { slot: 0 },
        _ => Acquire::Grant { slot: free_slot(existing, &occupied, &yields) },
    }
}

/// The number of grants that may exist at the same time; `None` for any number.
fn number(mode: Mode) -> Option<i32> {
    match mode {
        Mode::Exclusive => Some(1),
        Mode::Slots(n) => Some(n),
        Mode::Shared => None,
    }
}

/// Returns true if the new grant, made in another slot, ends this one. The caller's own grant ends if it is reclaimed.
/// A grant that is over only by its deadline or its session ends if it excludes the new one: it must not come back if
/// the clock is set back.
pub fn ends(request: &AcquireRequest, other: &ExistingGrant, now: Instant) -> bool {
    let excludes = request.mode == Mode::Exclusive || other.grant.mode != request.mode;
    match other.grant.phase(now) {
        _ if other.guarded => false,
        Phase::Held => request.reclaim && other.mine,
        Phase::Expired | Phase::Abandoned => excludes,
        Phase::Free => false,
    }
}

/// The caller's own slot if it is reclaimed, or else the lowest free slot.
fn free_slot(
    existing: &[ExistingGrant],
    occupied: &dyn Fn(&&ExistingGrant) -> bool,
    yields: &dyn Fn(&ExistingGrant) -> bool,
) -> i32 {
    if let Some(own) = existing.iter().filter(|s| yields(s)).map(|s| s.grant.slot).min() {
        return own;
    }
    let mut used: Vec<i32> = existing.iter().filter(occupied).map(|s| s.grant.slot).collect();
    used.sort_unstable();
    let mut slot = 0;
    for u in used {
        if u == slot {
            slot += 1;
        }
    }
    slot
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(us: i64) -> Instant {
        Instant::from_micros(us)
    }

    fn token(number: i64) -> Token {
        Token::from_bigint(number)
    }

    fn epoch(number: i64) -> Epoch {
        Epoch::at(token(number))
    }

    /// A grant acquired with token 10 and renewed with 12 and 15.
    fn held(slot: i32, mode: Mode, until: i64) -> ExistingGrant {
        let grant = Grant {
            tokens: Tokens::new(token(10), &[12, 15].map(token)),
            expires_at: at(until),
            ..ExistingGrant::in_the_making(slot, mode).grant
        };
        ExistingGrant { grant, mine: false, guarded: false }
    }

    /// An adopted grant with this number.
    fn adopted(number: i64, under: i64) -> Grant {
        let tokens = Tokens::new(token(number), &[]);
        let grant = held(0, Mode::Exclusive, 0).grant;
        Grant { tokens, expires_at: Instant::LATEST, adopted: Some(epoch(under)), ..grant }
    }

    fn closed(grant: Grant, closing: i64, closed_here: bool) -> Grant {
        Grant { closing: Some(token(closing)), closed_here, ..grant }
    }

    #[test]
    fn only_the_latest_sixteen_renewals_speak_but_the_first_always() {
        let mut tokens = Tokens::new(token(1), &[]);
        for t in 2..=20 {
            tokens = tokens.renew(token(t));
        }
        let of_it: Vec<i64> = (0..30).filter(|n| tokens.contains(token(*n))).collect();
        assert_eq!(of_it, [1].into_iter().chain(5..=20).collect::<Vec<_>>());
        assert_eq!(tokens.latest(), token(20));
        assert_eq!(Tokens::new(token(1), tokens.renewed()), tokens);
    }

    #[test]
    fn which_tokens_speak_await_a_renewal_and_release() {
        use Release::{Again, Close, Lost};
        // The answers of `speaks` and `awaits_renewal`.
        const SPEAKS: (bool, bool) = (true, false);
        const AWAITS: (bool, bool) = (false, true);
        const SILENT: (bool, bool) = (false, false);
        let grant = held(0, Mode::Exclusive, 100).grant;
        let renewed = Grant { tokens: grant.tokens.renew(token(51)), ..grant };
        let abandoned = Grant { abandoned: true, ..grant };
        let (again, other) = (|closing| Again(token(closing)), adopted(3, 50));
        for (line, (grant, requested, now, under, voice, release)) in [
            // Tokens are values, not a range. At its deadline a grant is over.
            (grant, 9, 99, 0, SILENT, Lost),
            (grant, 10, 99, 0, SPEAKS, Close),
            (grant, 11, 99, 0, SILENT, Lost),
            (grant, 12, 99, 0, SPEAKS, Close),
            (grant, 13, 99, 0, SILENT, Lost),
            (grant, 15, 99, 0, SPEAKS, Close),
            (grant, 16, 99, 0, SILENT, Lost),
            (grant, 10, 100, 0, SILENT, Lost),
            (abandoned, 10, 1, 0, SILENT, Lost),
            // In a new epoch no token speaks before a renewal.
            (grant, 10, 1, 50, AWAITS, Close),
            (grant, 11, 1, 50, SILENT, Lost),
            (grant, 10, 100, 50, SILENT, Lost),
            (renewed, 10, 1, 50, SPEAKS, Close),
            (renewed, 51, 1, 50, SPEAKS, Close),
            // A closing token speaks only in the transaction that drew it, and in a new epoch only if the grant was
            // renewed.
            (closed(grant, 20, false), 20, 1, 0, SILENT, Lost),
            (closed(grant, 20, false), 10, 1, 0, SILENT, Lost),
            (closed(grant, 20, true), 20, 1, 0, SPEAKS, again(20)),
            (closed(grant, 20, true), 10, 1, 0, SILENT, again(20)),
            (closed(grant, 60, true), 60, 1, 50, AWAITS, again(60)),
            (closed(grant, 60, true), 10, 1, 50, SILENT, again(60)),
            (closed(renewed, 60, true), 60, 1, 50, SPEAKS, again(60)),
            // A grant that another one ended has no closing token.
            (closed(grant, 15, true), 10, 1, 0, SILENT, Lost),
            (closed(grant, 15, true), 15, 1, 0, SILENT, Lost),
            // An adopted token speaks until a new epoch, whatever the sequence's value.
            (other, 3, 1, 50, SPEAKS, Close),
            (other, 4, 1, 50, SILENT, Lost),
            (other, 3, 1, 51, AWAITS, Close),
            (closed(other, 3, true), 3, 1, 50, SPEAKS, again(3)),
            (closed(other, 3, false), 3, 1, 50, SILENT, Lost),
            // A greater adopted number has ended the grant.
            (closed(other, 9, true), 3, 1, 50, SILENT, Lost),
            (closed(other, 9, true), 9, 1, 50, SILENT, Lost),
        ]
        .into_iter()
        .enumerate()
        {
            let (requested, now, under) = (token(requested), at(now), epoch(under));
            let found =
                (grant.speaks(requested, now, under), grant.awaits_renewal(requested, now, under));
            assert_eq!((found, grant.release(requested, now)), (voice, release), "line {line}");
            assert_eq!(grant.renewable(requested, now), release == Close, "line {line}");
        }
    }

    fn holders<'a>(recorded: &'a str, adopting: &'a str) -> Holders<'a> {
        let named = |name: &'a str| (name != "-").then_some(name.as_bytes());
        Holders { recorded: named(recorded), adopting: named(adopting) }
    }

    #[test]
    fn an_adopted_token_ends_smaller_ones_for_good() {
        use Adopt::{Current, GrantedHere, Greater, OfEarlierEpoch, Stale};
        let here = adopted(5, 50);
        assert_eq!(adopt(&[], token(5), epoch(50), holders("-", "b")), Greater);
        for (grant, verdicts) in [
            (here, vec![(4, Stale), (5, Current), (6, Greater)]),
            (adopted(5, 7), vec![(5, OfEarlierEpoch)]),
            // The adopted grant was released or revoked.
            (closed(here, 5, false), vec![(4, Stale), (5, Stale), (6, Greater)]),
            // The grant was ended by a pending adoption of 9.
            (closed(here, 9, false), vec![(5, Stale), (8, Stale), (9, Greater), (10, Greater)]),
            (held(0, Mode::Exclusive, 0).grant, vec![(99, GrantedHere)]),
        ] {
            for (number, verdict) in verdicts {
                let found = adopt(&[grant], token(number), epoch(50), holders("a", "a"));
                assert_eq!(found, verdict, "{number}");
                // Another holder is refused only if the number is current.
                let other = adopt(&[grant], token(number), epoch(50), holders("a", "b"));
                let current = matches!(verdict, Current | OfEarlierEpoch);
                assert_eq!(other, if current { Adopt::OtherHolder } else { verdict }, "{number}");
            }
        }
    }

    #[test]
    fn a_number_is_of_one_holder_where_both_are_named() {
        for (recorded, adopting, other) in [
            ("-", "-", false),
            ("-", "b", false),
            ("a", "-", false),
            ("a", "a", false),
            ("a", "b", true),
            ("a", "", true),
            ("", "a", true),
            ("", "", false),
            ("a", "a ", true),
        ] {
            let found = adopt(&[adopted(5, 50)], token(5), epoch(50), holders(recorded, adopting));
            let expected = if other { Adopt::OtherHolder } else { Adopt::Current };
            assert_eq!(found, expected, "{recorded} {adopting}");
        }
    }

    #[test]
    fn who_is_granted_what_beside_whom() {
        use Mode::{Exclusive, Shared, Slots};
        let granted = |slot| Acquire::Grant { slot };
        let until = |us| Acquire::Taken { until: Some(at(us)) };
        let (unknown, differ) =
            (Acquire::Taken { until: None }, |live| Acquire::SlotsDiffer { live });
        let one = held(0, Exclusive, 100);
        let mine = ExistingGrant { mine: true, ..one };
        let guarded = |one| ExistingGrant { guarded: true, ..one };
        let left = ExistingGrant { grant: Grant { abandoned: true, ..one.grant }, ..one };
        let of_mine = |mode| guarded(ExistingGrant { mine: true, ..held(0, mode, 100) });
        let readers = vec![held(0, Shared, 100), held(2, Shared, 100)];
        let full = vec![held(0, Slots(2), 50), held(1, Slots(2), 70)];
        for (line, (existing, mode, reclaim, now, expected)) in [
            (vec![], Exclusive, false, 1, granted(0)),
            (vec![one], Exclusive, false, 99, until(100)),
            (vec![one], Exclusive, false, 100, granted(0)),
            (vec![left], Exclusive, false, 1, granted(0)),
            // A guard outlives the deadline, and the end of the session.
            (vec![guarded(one)], Exclusive, false, 100, unknown),
            (vec![guarded(one)], Shared, false, 100, unknown),
            (vec![guarded(one)], Slots(2), false, 100, unknown),
            (vec![guarded(one)], Slots(2), false, 99, differ(1)),
            (vec![guarded(left)], Exclusive, false, 1, unknown),
            // A grant is reclaimed by the same holder only, and not while it is guarded.
            (vec![one], Exclusive, true, 1, until(100)),
            (vec![mine], Exclusive, true, 1, granted(0)),
            (vec![mine], Exclusive, false, 1, until(100)),
            (vec![of_mine(Exclusive)], Exclusive, true, 1, unknown),
            (vec![of_mine(Shared)], Shared, true, 1, unknown),
            (vec![of_mine(Slots(2))], Slots(2), true, 1, unknown),
            // Shared grants coexist, and slots up to their number.
            (readers.clone(), Shared, false, 1, granted(1)),
            (readers, Exclusive, false, 1, until(100)),
            (full.clone(), Slots(2), false, 1, until(50)),
            (full.clone(), Slots(2), false, 60, granted(0)),
            (full.clone(), Slots(3), false, 1, differ(2)),
            (full.clone(), Slots(3), false, 80, granted(0)),
            (full, Shared, false, 1, until(70)),
        ]
        .into_iter()
        .enumerate()
        {
            assert_eq!(
                admit(&existing, &AcquireRequest { mode, reclaim }, at(now)),
                expected,
                "line {line}"
            );
        }
    }

    #[test]
    fn what_a_row_under_way_counts_as() {
        use Mode::{Exclusive, Shared, Slots};
        let granted = |slot| Acquire::Grant { slot };
        let unknown = Acquire::Taken { until: None };
        let (live, over) = (held(0, Slots(2), 100), held(0, Slots(2), 1));
        let made = |slot, mode| held(slot, mode, 100).grant;
        let ended_in = |slot| closed(held(slot, Shared, 1).grant, 15, false);
        // Ended by another grant, and released.
        let (ended, released) = (closed(over.grant, 15, false), closed(over.grant, 16, false));
        for (line, (committed, under_way, mode, expected)) in [
            (vec![], vec![made(0, Shared)], Shared, granted(1)),
            (vec![], vec![made(0, Shared)], Slots(2), unknown),
            (vec![], vec![made(0, Slots(3))], Slots(2), unknown),
            (vec![], vec![made(0, Slots(2)), made(1, Slots(2))], Slots(2), unknown),
            (vec![], vec![made(0, Shared)], Exclusive, unknown),
            // A live grant is renewed or released, or reclaimed in the same or in another mode.
            (vec![live], vec![made(0, Slots(2))], Slots(2), granted(1)),
            (vec![live], vec![closed(live.grant, 16, false)], Slots(2), granted(1)),
            (vec![live], vec![made(0, Shared)], Slots(2), unknown),
            // The slot of a grant that is over: a new grant, a renewal, a release that may be guarded, an end by a grant
            // in another slot.
            (vec![over], vec![made(0, Slots(2))], Slots(2), granted(1)),
            (vec![over], vec![made(0, Shared)], Shared, granted(1)),
            (vec![over], vec![made(0, Shared)], Slots(2), unknown),
            (vec![over], vec![released], Shared, unknown),
            (vec![over], vec![ended], Shared, granted(1)),
            (vec![over], vec![ended, made(1, Shared)], Shared, granted(2)),
            (vec![over], vec![ended, made(1, Shared)], Slots(2), unknown),
            // The grant that is being ended lies in a slot that no request for two slots can get.
            (vec![held(5, Shared, 1)], vec![ended_in(5), made(0, Slots(2))], Slots(2), granted(1)),
            // A version that its transaction has replaced counts like the newer one.
            (vec![], vec![made(0, Shared), made(0, Slots(2))], Slots(2), unknown),
            (vec![], vec![made(0, Slots(2)), made(0, Slots(2))], Slots(2), granted(1)),
        ]
        .into_iter()
        .enumerate()
        {
            let mut existing = committed;
            add_under_way(&mut existing, &under_way, mode, at(50));
            let request = AcquireRequest { mode, reclaim: false };
            assert_eq!(admit(&existing, &request, at(50)), expected, "line {line}");
            assert!(!existing.iter().any(|one| ends(&request, one, at(50))), "line {line}");
        }
    }

    #[test]
    fn a_grant_ends_what_must_not_come_back_beside_it() {
        let shared = held(1, Mode::Shared, 100);
        let guarded = ExistingGrant { guarded: true, ..shared };
        let (mine, mut left) = (ExistingGrant { mine: true, ..shared }, shared);
        left.grant.abandoned = true;
        for (line, (mode, reclaim, other, now, ended)) in [
            (Mode::Exclusive, false, shared, 99, false),
            (Mode::Exclusive, false, shared, 100, true),
            (Mode::Exclusive, false, guarded, 100, false),
            (Mode::Slots(2), false, shared, 100, true),
            (Mode::Slots(2), false, left, 1, true),
            (Mode::Shared, false, shared, 100, false),
            (Mode::Shared, true, shared, 99, false),
            (Mode::Shared, true, mine, 99, true),
            (Mode::Shared, true, ExistingGrant { guarded: true, ..mine }, 99, false),
        ]
        .into_iter()
        .enumerate()
        {
            assert_eq!(
                ends(&AcquireRequest { mode, reclaim }, &other, at(now)),
                ended,
                "line {line}"
            );
        }
    }
}
