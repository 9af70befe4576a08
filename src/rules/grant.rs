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
    /// It is greater than every token that the name has had.
    Greater,
    /// It is smaller than one that the name has had, or was released or revoked.
    Stale,
    /// The name was granted here.
    GrantedHere,
}

/// Decides what becomes of a token that somebody else has granted, by the rows that the name has.
pub fn adopt(existing: &[Grant], token: Token, floor: Floor) -> Adopt {
    let mut found = Adopt::Greater;
    for grant in existing {
        let (Some(under), latest) = (grant.adopted, grant.tokens.latest()) else {
            return Adopt::GrantedHere;
        };
        found = match grant.closing {
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

    fn existing(slot: i32, mode: Mode, expires: i64) -> ExistingGrant {
        let grant = Grant {
            slot,
            mode,
            tokens: Tokens::new(token(10), &[12, 15].map(token)),
            closing: None,
            closed_here: false,
            expires_at: at(expires),
            abandoned: false,
            adopted: None,
        };
        ExistingGrant { grant, mine: false, guarded: false }
    }

    fn ask(mode: Mode) -> Ask {
        Ask { mode, reclaim: false }
    }

    #[test]
    fn tokens_are_values_not_a_range() {
        let g = existing(0, Mode::Exclusive, 100).grant;
        assert!([10, 12, 15].map(token).iter().all(|t| g.speaks(*t, at(99), floor(0))));
        assert!([9, 11, 13, 16].map(token).iter().all(|t| !g.speaks(*t, at(99), floor(0))));
        assert!(!g.speaks(token(10), at(100), floor(0)), "the deadline itself is over");
    }

    #[test]
    fn only_the_latest_sixteen_renewals_speak_but_the_first_always() {
        let mut tokens = Tokens::new(token(1), &[]);
        for t in 2..=20 {
            tokens = tokens.renew(token(t));
        }
        assert!(tokens.contains(token(1)));
        assert!(!tokens.contains(token(4)));
        assert!((5..=20).all(|t| tokens.contains(token(t))));
        assert_eq!(tokens.latest(), token(20));
        assert_eq!(Tokens::new(token(1), tokens.renewed()), tokens);
    }

    #[test]
    fn an_adopted_token_ends_smaller_ones_for_good() {
        let (here, before) = (floor(50), floor(7));
        let row = |number, closing: Option<i64>, under| Grant {
            tokens: Tokens::new(token(number), &[]),
            closing: closing.map(token),
            expires_at: Instant::LATEST,
            adopted: Some(under),
            ..existing(0, Mode::Exclusive, 0).grant
        };
        let found = |grant: Grant, number| adopt(&[grant], token(number), here);
        assert_eq!(adopt(&[], token(5), here), Adopt::Greater);
        let current = row(5, None, here);
        assert_eq!(
            [4, 5, 6].map(|n| found(current, n)),
            [Adopt::Stale, Adopt::Current, Adopt::Greater]
        );
        assert_eq!(found(row(5, None, before), 5), Adopt::AfterJump);
        // Released or revoked.
        assert_eq!(
            [4, 5, 6].map(|n| found(row(5, Some(5), here), n)),
            [Adopt::Stale, Adopt::Stale, Adopt::Greater]
        );
        // Ended by an adoption of 9 that is not answered yet.
        assert_eq!(
            [5, 8, 9, 10].map(|n| found(row(5, Some(9), here), n)),
            [Adopt::Stale, Adopt::Stale, Adopt::Greater, Adopt::Greater]
        );
        assert_eq!(found(existing(0, Mode::Exclusive, 0).grant, 99), Adopt::GrantedHere);
    }

    #[test]
    fn an_adopted_token_speaks_whatever_the_sequence_says_until_a_jump() {
        let mut g = existing(0, Mode::Exclusive, 0).grant;
        g = Grant { tokens: Tokens::new(token(3), &[]), expires_at: Instant::LATEST, ..g };
        g.adopted = Some(floor(50));
        assert!(g.speaks(token(3), at(1), floor(50)) && !g.speaks(token(4), at(1), floor(50)));
        assert!(
            !g.speaks(token(3), at(1), floor(51)) && g.awaits_renewal(token(3), at(1), floor(51))
        );
        // A release's own token speaks to the end of its transaction; one that a greater token ended does not.
        (g.closing, g.closed_here) = (Some(token(3)), true);
        assert!(g.speaks(token(3), at(1), floor(50)));
        assert_eq!(g.release(token(3), at(1)), Release::Again(token(3)));
        g.closing = Some(token(9));
        assert!(!g.speaks(token(3), at(1), floor(50)) && !g.speaks(token(9), at(1), floor(50)));
        assert_eq!(g.release(token(3), at(1)), Release::Lost);
        g.closed_here = false;
        assert!(!g.speaks(token(3), at(1), floor(50)));
    }

    #[test]
    fn after_a_jump_nothing_speaks_until_renewed() {
        let mut g = existing(0, Mode::Exclusive, 100).grant;
        assert!(!g.speaks(token(10), at(1), floor(50)));
        assert!(g.renewable(token(10), at(1)));
        assert_eq!(g.release(token(10), at(1)), Release::Close);
        assert!(
            g.awaits_renewal(token(10), at(1), floor(50))
                && !g.awaits_renewal(token(11), at(1), floor(50))
        );
        assert!(!g.awaits_renewal(token(10), at(100), floor(50)), "it has expired");
        g.tokens = g.tokens.renew(token(51));
        assert!(
            g.speaks(token(10), at(1), floor(50))
                && g.speaks(token(51), at(1), floor(50))
                && !g.awaits_renewal(token(10), at(1), floor(50))
        );
    }

    #[test]
    fn a_closing_token_speaks_only_where_it_was_drawn() {
        let mut g = existing(0, Mode::Exclusive, 100).grant;
        g.closing = Some(token(20));
        assert!(!g.speaks(token(20), at(1), floor(0)) && !g.speaks(token(10), at(1), floor(0)));
        assert_eq!(g.release(token(10), at(1)), Release::Lost);
        g.closed_here = true;
        assert!(g.speaks(token(20), at(1), floor(0)) && !g.speaks(token(10), at(1), floor(0)));
        assert_eq!(g.release(token(10), at(1)), Release::Again(token(20)));
        assert!(!g.renewable(token(10), at(1)));
    }

    #[test]
    fn a_closing_token_drawn_after_a_jump_speaks_only_where_the_grant_was_renewed() {
        let mut g = existing(0, Mode::Exclusive, 100).grant;
        (g.closing, g.closed_here) = (Some(token(60)), true);
        assert!(
            !g.speaks(token(60), at(1), floor(50)) && g.awaits_renewal(token(60), at(1), floor(50))
        );
        assert_eq!(g.release(token(10), at(1)), Release::Again(token(60)));
        g.tokens = g.tokens.renew(token(51));
        assert!(
            g.speaks(token(60), at(1), floor(50)) && !g.awaits_renewal(token(60), at(1), floor(50))
        );
    }

    #[test]
    fn exclusive_waits_for_everybody_and_a_guard_outlives_the_deadline() {
        let mut s = existing(0, Mode::Exclusive, 100);
        assert_eq!(admit(&[], &ask(Mode::Exclusive), at(1)), Acquire::Grant { slot: 0 });
        assert_eq!(
            admit(&[s], &ask(Mode::Exclusive), at(99)),
            Acquire::Taken { until: Some(at(100)) }
        );
        assert_eq!(admit(&[s], &ask(Mode::Exclusive), at(100)), Acquire::Grant { slot: 0 });
        s.guarded = true;
        for mode in [Mode::Exclusive, Mode::Shared, Mode::Slots(2)] {
            assert_eq!(admit(&[s], &ask(mode), at(100)), Acquire::Taken { until: None });
        }
        assert_eq!(admit(&[s], &ask(Mode::Slots(2)), at(99)), Acquire::SlotsDiffer { live: 1 });
    }

    #[test]
    fn reclaim_is_for_the_same_holder_and_not_over_a_guard() {
        let mut s = existing(0, Mode::Exclusive, 100);
        let again = Ask { mode: Mode::Exclusive, reclaim: true };
        assert_eq!(admit(&[s], &again, at(1)), Acquire::Taken { until: Some(at(100)) });
        s.mine = true;
        assert_eq!(admit(&[s], &again, at(1)), Acquire::Grant { slot: 0 });
        assert_eq!(
            admit(&[s], &ask(Mode::Exclusive), at(1)),
            Acquire::Taken { until: Some(at(100)) }
        );
        s.guarded = true;
        assert_eq!(admit(&[s], &again, at(1)), Acquire::Taken { until: None });
        for mode in [Mode::Shared, Mode::Slots(2)] {
            s.grant.mode = mode;
            let again = Ask { mode, reclaim: true };
            assert_eq!(admit(&[s], &again, at(1)), Acquire::Taken { until: None });
        }
    }

    #[test]
    fn what_another_grant_ended_has_no_closing_token() {
        let mut g = existing(0, Mode::Shared, 100).grant;
        g.closing = Some(g.tokens.latest());
        g.closed_here = true;
        assert!([10, 12, 15].map(token).iter().all(|t| !g.speaks(*t, at(1), floor(0))));
        assert!([10, 12, 15].map(token).iter().all(|t| g.release(*t, at(1)) == Release::Lost));
    }

    #[test]
    fn a_grant_ends_what_must_not_come_back_beside_it() {
        let shared = existing(1, Mode::Shared, 100);
        let (all, one) = (ask(Mode::Shared), ask(Mode::Exclusive));
        assert!(ends(&one, &shared, at(100)) && ends(&ask(Mode::Slots(2)), &shared, at(100)));
        assert!(!ends(&all, &shared, at(100)) && !ends(&one, &shared, at(99)));
        assert!(!ends(&one, &ExistingGrant { guarded: true, ..shared }, at(100)));
        let reclaim = Ask { reclaim: true, ..all };
        assert!(!ends(&reclaim, &shared, at(99)));
        assert!(ends(&reclaim, &ExistingGrant { mine: true, ..shared }, at(99)));
        assert!(!ends(&reclaim, &ExistingGrant { mine: true, guarded: true, ..shared }, at(99)));
    }

    #[test]
    fn what_its_session_has_abandoned_is_over_and_does_not_come_back() {
        let mut s = existing(0, Mode::Exclusive, 100);
        s.grant.abandoned = true;
        assert_eq!(
            (s.grant.phase(at(99)), s.grant.phase(at(100))),
            (Phase::Abandoned, Phase::Expired)
        );
        assert!(
            !s.grant.speaks(token(10), at(1), floor(0)) && !s.grant.renewable(token(10), at(1))
        );
        assert_eq!(s.grant.release(token(10), at(1)), Release::Lost);
        assert_eq!(admit(&[s], &ask(Mode::Exclusive), at(1)), Acquire::Grant { slot: 0 });
        s.guarded = true;
        let taken = Acquire::Taken { until: None };
        assert_eq!(admit(&[s], &ask(Mode::Exclusive), at(1)), taken);
        let shared = ExistingGrant { guarded: false, ..s };
        assert!(ends(&ask(Mode::Slots(2)), &shared, at(1)));
    }

    #[test]
    fn shared_and_slots() {
        let reader = |slot| existing(slot, Mode::Shared, 100);
        let two = [reader(0), reader(2)];
        assert_eq!(admit(&two, &ask(Mode::Shared), at(1)), Acquire::Grant { slot: 1 });
        assert_eq!(
            admit(&two, &ask(Mode::Exclusive), at(1)),
            Acquire::Taken { until: Some(at(100)) }
        );
        let worker = |slot, until| existing(slot, Mode::Slots(2), until);
        let full = [worker(0, 50), worker(1, 70)];
        assert_eq!(
            admit(&full, &ask(Mode::Slots(2)), at(1)),
            Acquire::Taken { until: Some(at(50)) }
        );
        assert_eq!(admit(&full, &ask(Mode::Slots(2)), at(60)), Acquire::Grant { slot: 0 });
        assert_eq!(admit(&full, &ask(Mode::Slots(3)), at(1)), Acquire::SlotsDiffer { live: 2 });
        assert_eq!(admit(&full, &ask(Mode::Slots(3)), at(80)), Acquire::Grant { slot: 0 });
        assert_eq!(admit(&full, &ask(Mode::Shared), at(1)), Acquire::Taken { until: Some(at(70)) });
    }
}
