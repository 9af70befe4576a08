//! A lease's grants: who may be granted, and which tokens speak.

use crate::{Floor, Instant, Token};

/// How many renewals of a grant are remembered, by value.
pub const RENEWALS_KEPT: usize = 16;

/// Which grants of a lease may live beside each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// One grant at a time.
    Exclusive,
    /// Any number of grants, none beside another mode.
    Shared,
    /// Up to so many grants.
    Slots(i32),
}

/// The tokens of one grant: the one it was acquired with and those of its latest renewals. Values, never a
/// range: a token of another lease that falls between two of them is not one of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tokens {
    first: Token,
    renewed: [Token; RENEWALS_KEPT],
    kept: usize,
}

impl Tokens {
    /// The tokens of a grant with these renewals, oldest first; only the latest 16 are kept.
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

    /// The one drawn last, which is the greatest: each renewal's is greater than the one before.
    pub fn latest(&self) -> Token {
        self.renewed().last().copied().unwrap_or(self.first)
    }

    /// Is it one of them?
    pub fn contains(&self, token: Token) -> bool {
        token == self.first || self.renewed().contains(&token)
    }

    /// With one more renewal; the oldest is forgotten when there are more than 16.
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

/// A grant as a row of the lease table has it, as far as the rules care.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grant {
    /// Which of the lease's grants it is, from 0; an exclusive grant has 0.
    pub slot: i32,
    /// How it was asked for.
    pub mode: Mode,
    /// The tokens that it was acquired and renewed with.
    pub tokens: Tokens,
    /// The closing token, once released, revoked or replaced.
    pub closing: Option<Token>,
    /// Closed by the very transaction that is asking.
    pub closed_here: bool,
    /// Until when it counts, unless closed: at that very moment it is over.
    pub expires_at: Instant,
    /// It ends with the session that acquired it, and that one has ended.
    pub abandoned: bool,
    /// Somebody else has granted it, under a number of their own: the jump that was the latest when it was adopted. None
    /// for a grant that was made here.
    pub adopted: Option<Floor>,
}

/// A grant is in one of these.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Granted and not over.
    Held,
    /// Over by the clock.
    Expired,
    /// Over because the session that it was bound to has ended.
    Abandoned,
    /// Closed by release or revocation.
    Free,
}

impl Grant {
    /// Where it stands now.
    pub fn phase(&self, now: Instant) -> Phase {
        match self.closing {
            Some(_) => Phase::Free,
            None if now >= self.expires_at => Phase::Expired,
            None if self.abandoned => Phase::Abandoned,
            None => Phase::Held,
        }
    }

    /// Is it one of the grant's tokens, the closing one included?
    pub fn has(&self, token: Token) -> bool {
        self.tokens.contains(token) || self.closing == Some(token)
    }

    /// The greatest token that it has had.
    pub fn greatest(&self) -> Token {
        self.closing.unwrap_or(Token::BEFORE_ALL).max(self.tokens.latest())
    }

    /// Does the token speak for the lease: is it one of a current grant's, was the latest of them drawn after
    /// the last jump (`floor`), and is the grant neither expired nor abandoned? A closing token speaks for the rest of
    /// the transaction that drew it, where the grant's own did.
    pub fn speaks(&self, token: Token, now: Instant, floor: Floor) -> bool {
        self.names(token, now) && self.outlived(floor)
    }

    /// Is a jump all that keeps the token from speaking? Then a renewal helps, or adopting it again.
    pub fn awaits_renewal(&self, token: Token, now: Instant, floor: Floor) -> bool {
        self.names(token, now) && !self.outlived(floor)
    }

    /// Is it one of the tokens that a current grant goes by?
    fn names(&self, token: Token, now: Instant) -> bool {
        match self.closing {
            Some(closing) => self.closed_here && token == closing && self.has_closing_token(),
            None => self.phase(now) == Phase::Held && self.tokens.contains(token),
        }
    }

    /// Does the latest jump leave it its voice? The number of an adopted grant is not of the sequence that jumps.
    fn outlived(&self, floor: Floor) -> bool {
        match self.adopted {
            Some(under) => under == floor,
            None => floor.is_below(self.tokens.latest()),
        }
    }

    /// Was it closed by its holder, or revoked? Where another grant ended it (`ends`), it is closed with its own latest
    /// token; an adopted one, the other way round: with the greater token that ended it.
    fn has_closing_token(&self) -> bool {
        let latest = self.tokens.latest();
        match self.adopted {
            Some(_) => self.closing == Some(latest),
            None => self.closing.is_some_and(|closing| closing > latest),
        }
    }

    /// May it be renewed by this token, where it was granted here? A jump does not matter: renewing is how a holder
    /// survives one.
    pub fn renewable(&self, token: Token, now: Instant) -> bool {
        self.phase(now) == Phase::Held && self.tokens.contains(token)
    }

    /// Judges a release by this token. A jump does not matter here either: a holder that gives a lease back
    /// is believed as one that renews it.
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

/// The verdict on a release.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Release {
    /// The grant is current: draw a closing token and close it.
    Close,
    /// This transaction has closed it already, with this token.
    Again(Token),
    /// The token does not speak for the lease.
    Lost,
}

/// A grant that the lease has when another is asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExistingGrant {
    /// The grant as its row shows it.
    pub grant: Grant,
    /// Its holder and role are those of the caller.
    pub mine: bool,
    /// An open transaction guards it (or is just making it), so that its slot cannot be had even when the grant is
    /// over.
    pub guarded: bool,
}

impl ExistingGrant {
    /// A grant that another transaction is just writing, of the mode that is asked for: it counts as one that lives.
    pub fn in_the_making(slot: i32, mode: Mode) -> ExistingGrant {
        let grant = Grant {
            slot,
            mode,
            tokens: Tokens::new(Token::BEFORE_ALL, &[]),
            closing: None,
            closed_here: false,
            expires_at: Instant::LATEST,
            abandoned: false,
            adopted: None,
        };
        ExistingGrant { grant, mine: false, guarded: true }
    }
}

/// The request of an acquire.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ask {
    /// The mode of the grant to be made.
    pub mode: Mode,
    /// Replace the caller's own grant, if there is one.
    pub reclaim: bool,
}

/// The verdict on the adoption of a token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Adopt {
    /// The token is current: nothing is to be done.
    Current,
    /// It is current, but for a jump: it is to be made known again.
    AfterJump,
    /// It is current, jump or not, and another holder has adopted it.
    OtherHolder,
    /// It is greater than every token that the name has had.
    Greater,
    /// It is smaller than one that the name has had, or was released or revoked.
    Stale,
    /// The name was granted here.
    GrantedHere,
}

/// The holder that a row records and the holder that adopts now, as each has named itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Holders<'a> {
    /// The holder of the row; None if the adoption named none.
    pub recorded: Option<&'a [u8]>,
    /// The holder of this call; None if it names none.
    pub adopting: Option<&'a [u8]>,
}

impl Holders<'_> {
    /// Returns true if both are named, and by different names. A call without a name is taken for one of the recorded
    /// holder's: its transactions need not repeat the name.
    fn differ(&self) -> bool {
        matches!((self.recorded, self.adopting), (Some(one), Some(other)) if one != other)
    }
}

/// Decides what becomes of a token that somebody else has granted, by the rows that the name has.
pub fn adopt(existing: &[Grant], token: Token, floor: Floor, holders: Holders) -> Adopt {
    let mut found = Adopt::Greater;
    for grant in existing {
        let (Some(under), latest) = (grant.adopted, grant.tokens.latest()) else {
            return Adopt::GrantedHere;
        };
        found = match grant.closing {
            None if token == latest && holders.differ() => Adopt::OtherHolder,
            None if token == latest && under == floor => Adopt::Current,
            None if token == latest => Adopt::AfterJump,
            // A greater one that was announced may come.
            _ if token > latest && token >= grant.greatest() => Adopt::Greater,
            _ => Adopt::Stale,
        };
    }
    found
}

/// The verdict on an acquire.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Acquire {
    /// Grant it in this slot. With `reclaim`, the caller's own grants in other slots end.
    Grant {
        /// The slot to be written.
        slot: i32,
    },
    /// Others' grants leave no room for it.
    Taken {
        /// When the clock alone can change that; None where only the end of a transaction can.
        until: Option<Instant>,
    },
    /// Grants of another number of slots are live (an exclusive one counts as one slot).
    SlotsDiffer {
        /// The number in force.
        live: i32,
    },
    /// Tokens of somebody else's are adopted under this name.
    Adopted,
}

/// Decides whether another grant can be made beside those that the lease's rows tell of. `now` must have been read after
/// the locks were obtained: a caller that waited for them would else use a grant that has expired meanwhile.
pub fn admit(existing: &[ExistingGrant], ask: &Ask, now: Instant) -> Acquire {
    if existing.iter().any(|s| s.grant.adopted.is_some()) {
        return Acquire::Adopted;
    }
    let live = |s: &ExistingGrant| s.grant.phase(now) == Phase::Held;
    let yields = |s: &ExistingGrant| ask.reclaim && s.mine && live(s) && !s.guarded;
    // A guarded grant keeps its slot, live or not.
    let occupied = |s: &&ExistingGrant| (live(s) || s.guarded) && !yields(s);
    let taken = |by: &dyn Fn(&ExistingGrant) -> bool, all: bool| {
        let ends = existing.iter().filter(occupied).filter(|s| by(s)).map(|s| {
            if s.guarded {
                Instant::LATEST
            } else {
                s.grant.expires_at
            }
        });
        let until = if all { ends.max() } else { ends.min() };
        Acquire::Taken { until: until.filter(|at| *at < Instant::LATEST) }
    };
    if ask.reclaim && existing.iter().any(|s| s.mine && live(s) && s.guarded) {
        // A second grant beside it is not what was asked for.
        return Acquire::Taken { until: None };
    }
    if let Some(asked) = number(ask.mode) {
        let in_force = |s: &ExistingGrant| number(s.grant.mode).filter(|_| live(s) && !yields(s));
        if let Some(live) = existing.iter().filter_map(in_force).find(|n| *n != asked) {
            return Acquire::SlotsDiffer { live };
        }
    }
    // A shared request conflicts with other modes only; so does one for slots, up to their number.
    let excludes = |s: &ExistingGrant| ask.mode == Mode::Exclusive || s.grant.mode != ask.mode;
    if existing.iter().filter(occupied).any(excludes) {
        return taken(&excludes, true);
    }
    match ask.mode {
        Mode::Slots(n)
            if existing.iter().filter(occupied).count() >= usize::try_from(n).unwrap_or(0) =>
        {
            taken(&|_| true, false)
        }
        Mode::Exclusive => Acquire::Grant { slot: 0 },
        _ => Acquire::Grant { slot: free_slot(existing, &occupied, &yields) },
    }
}

/// How many grants may live together; None for any number.
fn number(mode: Mode) -> Option<i32> {
    match mode {
        Mode::Exclusive => Some(1),
        Mode::Slots(n) => Some(n),
        Mode::Shared => None,
    }
}

/// Does the new grant, in another slot, end this one? The caller's own does where it is reclaimed, and one
/// that nothing but the clock or the end of its session has ended and that excludes the new one: it must not come
/// back, should the clock be set back.
pub fn ends(ask: &Ask, other: &ExistingGrant, now: Instant) -> bool {
    let excludes = ask.mode == Mode::Exclusive || other.grant.mode != ask.mode;
    match other.grant.phase(now) {
        _ if other.guarded => false,
        Phase::Held => ask.reclaim && other.mine,
        Phase::Expired | Phase::Abandoned => excludes,
        Phase::Free => false,
    }
}

/// The caller's own slot where it is reclaimed, else the lowest that nobody occupies.
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

    fn floor(number: i64) -> Floor {
        Floor::at(token(number))
    }

    /// Acquired with 10, renewed with 12 and 15.
    fn held(slot: i32, mode: Mode, until: i64) -> ExistingGrant {
        let grant = Grant {
            tokens: Tokens::new(token(10), &[12, 15].map(token)),
            expires_at: at(until),
            ..ExistingGrant::in_the_making(slot, mode).grant
        };
        ExistingGrant { grant, mine: false, guarded: false }
    }

    /// A grant that somebody else has made under this number.
    fn adopted(number: i64, jump: i64) -> Grant {
        let tokens = Tokens::new(token(number), &[]);
        let grant = held(0, Mode::Exclusive, 0).grant;
        Grant { tokens, expires_at: Instant::LATEST, adopted: Some(floor(jump)), ..grant }
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
        // Does it speak? Does it await a renewal?
        const SPEAKS: (bool, bool) = (true, false);
        const AWAITS: (bool, bool) = (false, true);
        const SILENT: (bool, bool) = (false, false);
        let grant = held(0, Mode::Exclusive, 100).grant;
        let renewed = Grant { tokens: grant.tokens.renew(token(51)), ..grant };
        let abandoned = Grant { abandoned: true, ..grant };
        let (again, other) = (|closing| Again(token(closing)), adopted(3, 50));
        for (line, (grant, asked, now, jump, voice, release)) in [
            // Values, not a range; at its deadline a grant is over.
            (grant, 9, 99, 0, SILENT, Lost),
            (grant, 10, 99, 0, SPEAKS, Close),
            (grant, 11, 99, 0, SILENT, Lost),
            (grant, 12, 99, 0, SPEAKS, Close),
            (grant, 13, 99, 0, SILENT, Lost),
            (grant, 15, 99, 0, SPEAKS, Close),
            (grant, 16, 99, 0, SILENT, Lost),
            (grant, 10, 100, 0, SILENT, Lost),
            (abandoned, 10, 1, 0, SILENT, Lost),
            // After a jump nothing speaks until it is renewed.
            (grant, 10, 1, 50, AWAITS, Close),
            (grant, 11, 1, 50, SILENT, Lost),
            (grant, 10, 100, 50, SILENT, Lost),
            (renewed, 10, 1, 50, SPEAKS, Close),
            (renewed, 51, 1, 50, SPEAKS, Close),
            // A closing token speaks only where it was drawn; after a jump only where the grant was renewed.
            (closed(grant, 20, false), 20, 1, 0, SILENT, Lost),
            (closed(grant, 20, false), 10, 1, 0, SILENT, Lost),
            (closed(grant, 20, true), 20, 1, 0, SPEAKS, again(20)),
            (closed(grant, 20, true), 10, 1, 0, SILENT, again(20)),
            (closed(grant, 60, true), 60, 1, 50, AWAITS, again(60)),
            (closed(grant, 60, true), 10, 1, 50, SILENT, again(60)),
            (closed(renewed, 60, true), 60, 1, 50, SPEAKS, again(60)),
            // What another grant ended has no closing token.
            (closed(grant, 15, true), 10, 1, 0, SILENT, Lost),
            (closed(grant, 15, true), 15, 1, 0, SILENT, Lost),
            // An adopted one speaks whatever the sequence says, until a jump.
            (other, 3, 1, 50, SPEAKS, Close),
            (other, 4, 1, 50, SILENT, Lost),
            (other, 3, 1, 51, AWAITS, Close),
            (closed(other, 3, true), 3, 1, 50, SPEAKS, again(3)),
            (closed(other, 3, false), 3, 1, 50, SILENT, Lost),
            // A greater one has ended it.
            (closed(other, 9, true), 3, 1, 50, SILENT, Lost),
            (closed(other, 9, true), 9, 1, 50, SILENT, Lost),
        ]
        .into_iter()
        .enumerate()
        {
            let (asked, now, jump) = (token(asked), at(now), floor(jump));
            let found = (grant.speaks(asked, now, jump), grant.awaits_renewal(asked, now, jump));
            assert_eq!((found, grant.release(asked, now)), (voice, release), "line {line}");
            assert_eq!(grant.renewable(asked, now), release == Close, "line {line}");
        }
    }

    fn holders<'a>(recorded: &'a str, adopting: &'a str) -> Holders<'a> {
        let named = |name: &'a str| (name != "-").then_some(name.as_bytes());
        Holders { recorded: named(recorded), adopting: named(adopting) }
    }

    #[test]
    fn an_adopted_token_ends_smaller_ones_for_good() {
        use Adopt::{AfterJump, Current, GrantedHere, Greater, Stale};
        let here = adopted(5, 50);
        assert_eq!(adopt(&[], token(5), floor(50), holders("-", "b")), Greater);
        for (grant, verdicts) in [
            (here, vec![(4, Stale), (5, Current), (6, Greater)]),
            (adopted(5, 7), vec![(5, AfterJump)]),
            // Released or revoked.
            (closed(here, 5, false), vec![(4, Stale), (5, Stale), (6, Greater)]),
            // Ended by an adoption of 9 that is not answered yet.
            (closed(here, 9, false), vec![(5, Stale), (8, Stale), (9, Greater), (10, Greater)]),
            (held(0, Mode::Exclusive, 0).grant, vec![(99, GrantedHere)]),
        ] {
            for (number, verdict) in verdicts {
                let found = adopt(&[grant], token(number), floor(50), holders("a", "a"));
                assert_eq!(found, verdict, "{number}");
                // Another holder is refused where the number is current, and nowhere else.
                let other = adopt(&[grant], token(number), floor(50), holders("a", "b"));
                let current = matches!(verdict, Current | AfterJump);
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
            let found = adopt(&[adopted(5, 50)], token(5), floor(50), holders(recorded, adopting));
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
            // To reclaim is for the same holder, and not over a guard.
            (vec![one], Exclusive, true, 1, until(100)),
            (vec![mine], Exclusive, true, 1, granted(0)),
            (vec![mine], Exclusive, false, 1, until(100)),
            (vec![of_mine(Exclusive)], Exclusive, true, 1, unknown),
            (vec![of_mine(Shared)], Shared, true, 1, unknown),
            (vec![of_mine(Slots(2))], Slots(2), true, 1, unknown),
            // Those who share, and slots up to their number.
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
            assert_eq!(admit(&existing, &Ask { mode, reclaim }, at(now)), expected, "line {line}");
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
            assert_eq!(ends(&Ask { mode, reclaim }, &other, at(now)), ended, "line {line}");
        }
    }
}
