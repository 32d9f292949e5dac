CREATE TABLE IF NOT EXISTS policy_revisions (
    revision INTEGER NOT NULL PRIMARY KEY,
    etag VARCHAR(64) NOT NULL,
    policy TEXT NOT NULL,
    author TEXT NOT NULL,
    reason TEXT NOT NULL,
    created_at TIMESTAMPTZ NOT NULL
);
CREATE TABLE meridian_schema (version INTEGER NOT NULL PRIMARY KEY);
INSERT INTO meridian_schema VALUES (1);
ALTER TABLE policy_revisions ADD COLUMN request_id VARCHAR(128);
CREATE UNIQUE INDEX policy_revisions_request_id ON policy_revisions (request_id);
INSERT INTO meridian_schema VALUES (2);
CREATE TABLE replicas (
    replica_id VARCHAR(128) NOT NULL PRIMARY KEY,
    address TEXT NOT NULL,
    heartbeat_at TIMESTAMPTZ NOT NULL
);
CREATE TABLE leader (
    number INTEGER NOT NULL PRIMARY KEY,
    replica_id VARCHAR(128) NOT NULL,
    token BIGINT NOT NULL,
    expires_at TIMESTAMPTZ NOT NULL
);
INSERT INTO meridian_schema VALUES (3);
CREATE TABLE audit_records (
    id BIGINT NOT NULL PRIMARY KEY,
    time TIMESTAMPTZ NOT NULL,
    principal TEXT NOT NULL,
    role VARCHAR(16) NOT NULL,
    peer TEXT NOT NULL,
    method TEXT NOT NULL,
    request_id TEXT NOT NULL,
    reason TEXT NOT NULL,
    details TEXT NOT NULL,
    before_etag TEXT NOT NULL,
    after_etag TEXT NOT NULL,
    outcome VARCHAR(32) NOT NULL,
    error TEXT NOT NULL
);
INSERT INTO meridian_schema VALUES (4);
CREATE TABLE freezes (
    freeze_id INTEGER NOT NULL PRIMARY KEY,
    engines TEXT NOT NULL,
    author TEXT NOT NULL,
    reason TEXT NOT NULL,
    create_time TIMESTAMPTZ NOT NULL,
    end_time TIMESTAMPTZ NOT NULL
);
INSERT INTO meridian_schema VALUES (5);
CREATE TABLE rollouts (
    rollout_id INTEGER NOT NULL PRIMARY KEY,
    active INTEGER UNIQUE,
    candidate_revision INTEGER NOT NULL,
    version INTEGER NOT NULL,
    request_id VARCHAR(128) UNIQUE,
    rollout TEXT NOT NULL
);
INSERT INTO meridian_schema VALUES (6);
