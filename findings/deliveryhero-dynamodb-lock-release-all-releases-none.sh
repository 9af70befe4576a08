#!/bin/bash
# @deliveryhero/dynamodb-lock 2.0.0 (npm): releaseAllLocks() releases no lock.
#
# Guess: it is what a process calls as it is told to end: each lock of the client is deleted from the table, as
#   releaseLock() does with one, and others have them at once.
# Seen: the client forgets its locks and stops their renewal, and nothing is sent to the table. The promise is kept, no
#   error is raised, and others wait until the lease has run out.
. "$(dirname "$0")/lib.sh"
pip_install 'moto[server,dynamodb]==5.1.4' boto3==1.38.27
dynamodb LockTable lockId:S lockGroup:S
npm_install @deliveryhero/dynamodb-lock@2.0.0 @aws-sdk/client-dynamodb@3.828.0 @aws-sdk/lib-dynamodb@3.828.0
node > "$work/seen" <<'END' || true
import { DynamoDB } from "@aws-sdk/client-dynamodb"
import { DynamoDBDocument } from "@aws-sdk/lib-dynamodb"
import lock from "@deliveryhero/dynamodb-lock"
const table = DynamoDBDocument.from(new DynamoDB({ region: "us-east-1" }), { marshallOptions: { removeUndefinedValues: true } })
const [ours, theirs] = [1, 2].map(() => lock.dynamoDBLockClientFactory(table))
const options = { leaseDurationInMs: 8000, prolongEveryMs: 2000, trustLocalTime: true, waitDurationInMs: 200 }
const show = async when => {
  const { Items } = await table.scan({ TableName: "LockTable" })
  console.log(`${when}; in the table: ${Items.map(item => item.lockId).sort().join(", ") || "nothing"}`)
}
await ours.releaseLock(await ours.lock("jobs", "report", options))
await show("releaseLock")
await ours.lock("jobs", "report", options)
await ours.lock("jobs", "invoice", options)
await show("two locks are held")
await ours.releaseAllLocks()
await show("releaseAllLocks")
const began = Date.now()
await theirs.lock("jobs", "report", options)
console.log("another one waits for the end of the lease:", Date.now() - began > 5000)
process.exit()
END
still <<'END'
releaseLock; in the table: nothing
two locks are held; in the table: invoice, report
releaseAllLocks; in the table: invoice, report
another one waits for the end of the lease: true
END
