//! `fence_audit` on who has been let near the table: privileges, and what was done with them, members of
//! the owner, foreign keys.

use crate::support::holes::{AuditedDatabase, Hole, BOUND, HOLE, LANDS};
use pg_test::{lab_test, Lab, Result};

#[lab_test]
fn who_may_truncate_is_found(lab: &Lab) -> Result<()> {
    let hole = Hole { write: "TRUNCATE orders", after: "42501", ..HOLE };
    AuditedDatabase::new(lab)?.close_all(&[
        Hole {
            built: "GRANT TRUNCATE ON orders TO :writer",
            found: &["orders|notice|:writer may TRUNCATE; only the trigger stands in the way"],
            before: "PF005",
            ..hole
        },
        Hole {
            built: "GRANT TRUNCATE ON orders TO PUBLIC; DROP TRIGGER fenced_truncate ON orders",
            found: &[
                "orders|notice|TRUNCATE not fenced",
                "orders|hole|PUBLIC may TRUNCATE; nothing stands in the way",
            ],
            ..hole
        },
    ])
}

#[lab_test]
fn who_may_create_a_trigger_is_found(lab: &Lab) -> Result<()> {
    let hole = Hole {
        built: "GRANT TRIGGER ON orders TO :writer",
        write: "CREATE FUNCTION low() RETURNS trigger LANGUAGE plpgsql AS \
                    'BEGIN NEW.fence := :old; RETURN NEW; END'; \
                CREATE TRIGGER zz BEFORE UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION low(); \
                UPDATE orders SET v = 33, fence = lease_renew('order:1', :new)",
        after: "42501",
        ..HOLE
    };
    AuditedDatabase::new(lab)?.close_all(&[
        Hole { found: MAY_CREATE, ..hole },
        // A trigger that runs later is looked at again. One in the place of that look is not.
        Hole { fence: VERIFIED, found: MAY_CREATE, before: "PF001", ..hole },
        Hole {
            fence: VERIFIED,
            found: MAY_CREATE,
            write: "CREATE FUNCTION lets_pass() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'; \
                    CREATE OR REPLACE TRIGGER fenced BEFORE UPDATE ON orders FOR EACH ROW \
                        EXECUTE FUNCTION lets_pass(); \
                    CREATE OR REPLACE TRIGGER fenced_verify AFTER UPDATE ON orders FOR EACH ROW \
                        EXECUTE FUNCTION lets_pass(); \
                    UPDATE orders SET v = 33",
            ..hole
        },
    ])
}

const MAY_CREATE: &[&str] =
    &["orders|hole|:writer may create triggers, and replace those of the fence"];
const VERIFIED: &str = ", lease => 'order:{id}', verify => true";

/// The writer's use of the right to create triggers; which is then taken back.
fn replaced(statements: &str) -> String {
    format!(
        "CREATE FUNCTION lets_pass() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN coalesce(NEW, OLD); END'; \
         GRANT TRIGGER ON ALL TABLES IN SCHEMA s TO :writer; SET ROLE :writer; {statements}; RESET ROLE; \
         REVOKE TRIGGER ON ALL TABLES IN SCHEMA s FROM :writer"
    )
}

const ROW: &str = "CREATE OR REPLACE TRIGGER fenced BEFORE INSERT OR UPDATE OR DELETE ON orders \
                       FOR EACH ROW EXECUTE FUNCTION lets_pass();";
const TRUNCATE: &str = "CREATE OR REPLACE TRIGGER fenced_truncate BEFORE TRUNCATE ON orders \
                            FOR EACH STATEMENT EXECUTE FUNCTION lets_pass();";
const VERIFY: &str = "CREATE OR REPLACE TRIGGER fenced_verify AFTER INSERT OR UPDATE ON orders \
                          FOR EACH ROW EXECUTE FUNCTION lets_pass();";

const ROW_FOUND: &str =
    r#"orders|hole|trigger "fenced" bears a name of the fence's, but calls s.lets_pass()"#;
const TRUNCATE_FOUND: &str =
    r#"orders|hole|trigger "fenced_truncate" bears a name of the fence's, but calls s.lets_pass()"#;
const VERIFY_FOUND: &str =
    r#"orders|hole|trigger "fenced_verify" bears a name of the fence's, but calls s.lets_pass()"#;

#[lab_test]
fn a_trigger_in_the_place_of_the_fence_s_is_found(lab: &Lab) -> Result<()> {
    let hole = Hole { by_admin: true, write: "UPDATE orders SET v = 33", after: "PF002", ..HOLE };
    let mut audited = AuditedDatabase::new(lab)?;
    for fence in ["", BOUND, ", lease => 'order:{id}', always => true"] {
        let events = if fence.is_empty() { "UPDATE, DELETE" } else { "INSERT, UPDATE, DELETE" };
        let missing = format!("orders|hole|{events} not fenced");
        audited.close_all(&[Hole {
            fence,
            built: &replaced(ROW),
            found: &[ROW_FOUND, &missing],
            ..hole
        }])?;
    }
    audited.close_all(&[
        Hole {
            built: &(replaced(TRUNCATE) + "; GRANT TRUNCATE ON orders TO :writer"),
            found: &[
                TRUNCATE_FOUND,
                "orders|notice|TRUNCATE not fenced",
                "orders|hole|:writer may TRUNCATE; nothing stands in the way",
            ],
            write: "TRUNCATE orders",
            after: "42501",
            ..hole
        },
        Hole {
            fence: VERIFIED,
            built: &(replaced(VERIFY)
                + "; CREATE FUNCTION low() RETURNS trigger LANGUAGE plpgsql AS \
                        'BEGIN NEW.fence := :old; RETURN NEW; END'; \
                     CREATE TRIGGER zz BEFORE UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION low()"),
            found: &[
                VERIFY_FOUND,
                r#"orders|hole|trigger "zz" runs after the fence and may change what it has judged"#,
            ],
            write: "UPDATE orders SET v = 35, fence = :new",
            after: "PF001",
            ..hole
        },
        // Where the column tells nothing either, being of another type.
        Hole {
            built: &(replaced(TRUNCATE) + "; ALTER TABLE orders ALTER fence TYPE numeric"),
            found: &[
                r#"orders|notice|the fence column "fence" is numeric, not bigint: no write can pass"#,
                TRUNCATE_FOUND,
                "orders|notice|TRUNCATE not fenced",
            ],
            write: "TRUNCATE orders",
            before: "42501",
            after: "42501",
            ..hole
        },
        // Nothing of the fence is left but its column.
        Hole {
            fence: VERIFIED,
            built: &replaced(&[ROW, TRUNCATE, VERIFY].concat()),
            found: &[ROW_FOUND, TRUNCATE_FOUND, VERIFY_FOUND],
            ..hole
        },
    ])
}

#[lab_test]
fn a_trigger_in_the_place_of_the_fence_s_is_found_on_partitions_and_children(
    lab: &Lab,
) -> Result<()> {
    const PARTITIONS: &str =
        "CREATE TABLE orders (id int, v int, fence bigint, region text DEFAULT 'eu', \
                                  PRIMARY KEY (id, region)) PARTITION BY LIST (region); \
                              CREATE TABLE eu PARTITION OF orders FOR VALUES IN ('eu')";
    const CHILD: &str = "SET ROLE :owner; CREATE TABLE child () INHERITS (orders); INSERT INTO child VALUES (2, 34, 1); \
                         DO $$ DECLARE r text; BEGIN \
                             FOR r IN SELECT remedy FROM fence_audit('orders') WHERE relation <> 'orders'::regclass LOOP EXECUTE r; END LOOP; END $$; RESET ROLE; ";
    const EU: &str =
        r#"eu|hole|trigger "fenced_truncate" bears a name of the fence's, but calls s.lets_pass()"#;
    let hole = Hole { by_admin: true, write: "UPDATE orders SET v = 33", after: "PF002", ..HOLE };
    let parts = Hole { table: PARTITIONS, ..hole };
    let on = |table: &str, statement: &str| statement.replace("ON orders", &format!("ON {table}"));
    let mut audited = AuditedDatabase::new(lab)?;
    audited.close_all(&[
        Hole {
            built: &replaced(&[ROW, &on("eu", TRUNCATE)].concat()),
            found: &[
                ROW_FOUND,
                "orders|hole|INSERT, UPDATE, DELETE not fenced",
                EU,
                "eu|notice|TRUNCATE not fenced",
            ],
            ..parts
        },
        Hole {
            built: &replaced(&[ROW, TRUNCATE, &on("eu", TRUNCATE)].concat()),
            found: &[ROW_FOUND, TRUNCATE_FOUND],
            ..parts
        },
        Hole {
            fence: VERIFIED,
            built: &replaced(&[ROW, VERIFY].concat()),
            found: &[ROW_FOUND, VERIFY_FOUND, "orders|hole|INSERT, UPDATE, DELETE not fenced"],
            ..parts
        },
    ])?;
    let child = [&ROW_FOUND, &TRUNCATE_FOUND].map(|found| found.replace("orders|", "child|"));
    audited.close_all(&[Hole {
        built: &(CHILD.to_owned() + &replaced(&on("child", &[ROW, TRUNCATE].concat()))),
        found: &[
            &child[0],
            &child[1],
            "child|hole|INSERT, UPDATE, DELETE not fenced",
            "child|notice|TRUNCATE not fenced",
        ],
        write: "UPDATE child SET v = 33",
        ..hole
    }])
}

#[lab_test]
fn a_right_passed_on_is_found(lab: &Lab) -> Result<()> {
    AuditedDatabase::new(lab)?.close_all(&[Hole {
        by_admin: true,
        built: "GRANT TRUNCATE ON orders TO :writer WITH GRANT OPTION; \
                SET ROLE :writer; GRANT TRUNCATE ON orders TO PUBLIC; RESET ROLE",
        found: &[
            "orders|notice|:writer may TRUNCATE; only the trigger stands in the way",
            "orders|notice|PUBLIC may TRUNCATE; only the trigger stands in the way",
        ],
        write: "TRUNCATE orders",
        before: "PF005",
        after: "42501",
        ..HOLE
    }])
}

#[lab_test]
fn a_member_of_the_owner_is_found(lab: &Lab) -> Result<()> {
    AuditedDatabase::new(lab)?.close_all(&[Hole {
        by_admin: true,
        built: "GRANT :owner TO :writer",
        found: &["orders|notice|:writer is a member of the owner, and may take the fence off"],
        write: "SELECT fence_unprotect('orders'); UPDATE orders SET v = 33",
        after: "42501",
        ..HOLE
    }])
}

#[lab_test]
fn a_foreign_key_that_writes_is_found(lab: &Lab) -> Result<()> {
    const TABLE: &str =
        "CREATE TABLE parent (id int PRIMARY KEY); INSERT INTO parent VALUES (1), (9); \
         CREATE TABLE orders (id int PRIMARY KEY, v int, fence bigint, \"x ON DELETE SET NULL (\" int DEFAULT 1)";
    const DELETE: &str = "DELETE FROM parent WHERE id = 1";
    const UPDATE: &str = "UPDATE parent SET id = 2 WHERE id = 1";
    let mut audited = AuditedDatabase::new(lab)?;
    for (action, events, write) in [
        ("ON DELETE CASCADE", "update,delete,truncate", DELETE),
        ("ON DELETE CASCADE", "update,truncate", DELETE),
        ("ON DELETE SET NULL", "update,delete,truncate", DELETE),
        ("ON DELETE SET NULL (\"x ON DELETE SET NULL (\")", "delete,truncate", DELETE),
        ("ON DELETE SET DEFAULT", "delete,truncate", DELETE),
        ("ON UPDATE CASCADE ON DELETE NO ACTION DEFERRABLE", "delete,truncate", UPDATE),
        ("ON UPDATE SET NULL", "update,delete,truncate", UPDATE),
        ("ON UPDATE CASCADE ON DELETE CASCADE", "update,delete,truncate", UPDATE),
        ("MATCH FULL ON UPDATE CASCADE ON DELETE CASCADE NOT VALID", "update,truncate", DELETE),
    ] {
        let missing = match events {
            "update,truncate" => Some("orders|hole|DELETE not fenced"),
            "delete,truncate" => Some("orders|hole|UPDATE not fenced"),
            _ => None,
        };
        let severity = if missing.is_some() { "hole" } else { "notice" };
        let key = format!(
            "orders|{severity}|foreign key \"The key\" writes here when a row of s.parent changes"
        );
        let found: Vec<&str> = missing.into_iter().chain([&*key]).collect();
        audited.close_all(&[Hole {
            table: TABLE,
            fence: "",
            built: &format!(
                "ALTER TABLE orders ADD CONSTRAINT \"The key\" FOREIGN KEY (\"x ON DELETE SET NULL (\") REFERENCES parent {action}; \
                 ALTER TABLE orders ALTER \"x ON DELETE SET NULL (\" SET DEFAULT 9; \
                 SELECT fence_protect('orders', events => '{events}')"
            ),
            found: &found,
            write,
            before: if missing.is_some() { LANDS } else { "PF002" },
            after: "23503",
            ..HOLE
        }])?;
    }
    Ok(())
}
