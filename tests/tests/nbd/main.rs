//! The NBD server, beside clients of all kinds: rules, requests, TLS, kills.

mod message_fuzz;
mod nbd_certificates;
mod nbd_clients;
mod nbd_crash;
mod nbd_malformed;
mod nbd_psk;
mod nbd_requests;
mod nbd_rules;
mod nbd_soak;
mod nbd_threads;
mod nbd_tls;
