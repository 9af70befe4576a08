//! Processes are frozen and killed, connections cut, servers failed over: the command never outlives its lease, except
//! if all of it is frozen. Then the server refuses its writes. `command::faults` plants faults for these scenarios.

use pg_test::clients::command::fixture::{CommandFixture, play, program};
use pg_test::clients::command::scenarios;
use pg_test::{Harness, Result};

fn plays(harness: &Harness, scenario: impl Fn(&mut CommandFixture) -> Result<()>) -> Result<()> {
    play(harness, &program()?, None, "", scenario)
}

/// Plays it with what it needs besides a database: `standby` or `pooler`.
fn plays_with(
    harness: &Harness,
    need: &str,
    scenario: impl Fn(&mut CommandFixture) -> Result<()>,
) -> Result<()> {
    play(harness, &program()?, Some(need), "", scenario)
}

cases![
    all_of_it_is_frozen_and_writes_when_it_goes_on => plays(scenarios::frozen_and_writes),
    all_of_it_is_frozen_and_ends_when_it_goes_on => plays(scenarios::frozen_and_ends),
    the_renewer_is_frozen_and_the_command_ends_before_the_lease => plays(scenarios::frozen_renewer),
    the_supervisor_is_frozen_and_the_lease_is_kept_until_it_is_lost => plays(scenarios::frozen_supervisor),
    the_supervisor_is_frozen_and_the_link_is_cut => plays(scenarios::frozen_supervisor_and_cut),
    the_command_alone_is_frozen_and_keeps_its_lease => plays(scenarios::frozen_command),
    a_frozen_command_that_ignores_term_ends_when_its_lease_is_revoked => plays(scenarios::frozen_and_revoked),
    a_command_that_listens_has_the_grace_to_end_by_itself => plays(scenarios::grace),
    the_supervisor_is_killed => plays(scenarios::killed_supervisor),
    the_renewer_is_killed => plays(scenarios::killed_renewer),
    both_are_killed_at_once_and_the_command_with_them => plays(|fixture| scenarios::killed(fixture, "job --ttl 3s")),
    the_link_is_cut => plays(scenarios::cut),
    a_cut_that_is_mended_in_time_ends_nothing => plays(scenarios::mended_in_time),
    the_server_fails_over_and_the_command_goes_on => plays_with("standby", |fixture| scenarios::fails_over(fixture, "--ttl 30s")),
    the_server_fails_over_and_an_adopted_token_is_adopted_again => plays_with("standby", |fixture| scenarios::fails_over(fixture, "--ttl 6s --adopt 33")),
    through_a_pooler_the_lease_is_kept_and_writes_need_the_token_set => plays_with("pooler", scenarios::through_a_pooler),
    a_session_lease_passes_on_when_its_connection_ends => plays(scenarios::session_lost),
    all_of_it_is_killed_and_its_session_lease_passes_on => plays(|fixture| scenarios::killed(fixture, "job --session --ttl 10m")),
    a_process_that_hides_from_the_renewer_is_ended_by_its_cgroup => plays(scenarios::hidden_from_the_renewer),
    an_unchanged_psql_presents_the_token => plays(scenarios::presented_by_psql),
    what_the_command_leaves_behind_ends_before_the_lease_does => plays(scenarios::left_behind),
    a_program_that_makes_itself_a_daemon_does_not_outlive_its_lease => plays(scenarios::daemons),
];
