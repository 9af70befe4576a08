//! Forty renewals: which of the tokens serve. When a token is drawn, and that they only grow: tokens.script.

automod::dir!(pub "tests/lab/tokens");

use pg_test::{ensure, lab_test, Calls, Lab, Result};

#[lab_test]
fn the_first_token_and_the_latest_sixteen_renewals_serve(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let first = session.acquire("job", "1 h")?;
    let mut renewals = Vec::new();
    for n in 1..=40 {
        renewals.push(session.renew("job", first)?.expect("held"));
        ensure!(session.speaks("job", first)?, "the acquire's token, after {n} renewals");
        let (old, latest) = renewals.split_at(renewals.len().saturating_sub(16));
        for &token in latest.iter().rev().take(17) {
            ensure!(session.speaks("job", token)?, "{token} of {renewals:?}");
        }
        if let Some(&token) = old.last() {
            ensure!(!session.speaks("job", token)?, "{token} of {renewals:?}");
        }
    }
    let (old, latest) = renewals.split_at(24);
    for &token in old {
        ensure!(!session.speaks("job", token)?);
        ensure!(session.renew("job", token)?.is_none() && session.release("job", token)?.is_none());
    }
    let next = session.renew("job", latest[0])?.expect("the sixteenth");
    ensure!(!session.speaks("job", latest[0])?, "now it is the seventeenth");
    ensure!(session.speaks("job", latest[1])? && session.speaks("job", next)?);
    ensure!(session.release("job", latest[1])?.is_some());
    Ok(())
}
