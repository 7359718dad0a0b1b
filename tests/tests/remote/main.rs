//! Disks elsewhere: HTTP, NBD, object stores, RBD, and the cache of them.

mod lazy_disks;
mod object_stores;
mod point_stores;
mod rbd;
mod registries;
mod registry_blobs;
mod registry_clients;
mod registry_kills;
mod registry_stacks;
mod remote_cache;
mod remote_commands;
mod remote_endings;
mod remote_http;
mod remote_nbd;
mod running_disks;
mod upload_kills;
mod verified_disks;
