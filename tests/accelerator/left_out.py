"""Tests of the project that `--device sim` leaves out, and why. The others run on both."""

BUDGET = "is about the one memory that a CPU has, and its budget"
FORWARD_AD = "torch's forward mode reads the memory of such a device itself"
DEVICE_BITS = "compares bits of the device's own update with those of the host's"
DEFAULT_DEVICE = "sets a default device of its own"
ADDRESSES = "tells buffers apart by their addresses, which a device uses again"
ON_CPU = "computes on the CPU by name"
TIMING = "counts on who waits at which moment, and the simulation takes its time"
NUMPY = "is about NumPy's view of host memory"
FORKS = "forks the process, and torch's threads do not come along"
COLLECTIVES = "is about data parallelism of torch's own, which has no collectives for the device"

CONJUGATES = "torch lets no conjugate view on such a device take the memory of a plain tensor"
BESIDE = "starts processes of its own, which compute on the CPU"
HOST_MEMORY = "is about arrays in host memory"

RUN, API = "tests/run/test_", "tests/api/test_"

DEVICE_ALONE = (RUN + "optimizers.py",)
"""Files whose tests at rest on host or disk are left out too."""

LEFT_OUT = {
    RUN + "kept_gradients.py::test_on_two_ranks": BESIDE,
    RUN + "optimizers.py::test_the_table_in_the_documentation_is_true": BESIDE,
    RUN + "streaming.py::test_a_process_that_ends_leaves_nothing_behind": BESIDE,
    RUN + "beside_the_gate.py::test_a_default_device_is_of_no_concern": DEFAULT_DEVICE,
    RUN + "delayed_update.py::test_a_checkpoint_holds_the_gradients_that_are_held_back[device]": DEVICE_BITS,
    RUN + "processes.py::test_a_forked_child_that_ends_normally_removes_nothing": FORKS,
    RUN + "mistakes_in_prepare.py::test_a_model_that_fits_nowhere_says_what_to_add": BUDGET,
    RUN + "errors.py::test_adding_a_group_beyond_the_budget_is_refused": BUDGET,
    RUN + "processes.py::test_forked_data_loader_workers_work_and_leave_the_files_alone": FORKS,
    RUN + "other_optimizers.py::test_models_that_are_wrapped_for_data_parallelism_are_refused": COLLECTIVES,
    RUN + "errors.py::test_moves_of_a_part_or_of_the_whole_that_change_nothing_are_let_through": ON_CPU,
    RUN + "errors.py::test_moves_of_a_part_or_of_the_whole_that_would_replace_parameters_are_refused[device-sh": ON_CPU,
    RUN + "errors.py::test_moves_of_a_part_or_of_the_whole_that_would_replace_parameters_are_refused[disk-sh": ON_CPU,
    RUN + "errors.py::test_moves_of_a_part_or_of_the_whole_that_would_replace_parameters_are_refused[host-sh": ON_CPU,
    RUN
    + "errors.py::test_moves_of_a_part_or_of_the_whole_that_would_replace_parameters_are_refused[squeezed-sh": ON_CPU,
    RUN + "other_optimizers.py::test_wrapping_a_prepared_model_for_data_parallelism_is_refused": COLLECTIVES,
    RUN + "open_units.py::test_a_model_whose_own_parameters_never_move_begins_its_passes": BUDGET,
    RUN + "param_groups.py::test_units_unfrozen_in_mid_run_go_where_the_others_had_to_go": BUDGET,
    RUN + "param_groups.py::test_units_unfrozen_in_mid_run_train_as_in_torch_where_they_rest_in_memory": BUDGET,
    RUN + "parity.py::test_bf16_weights_and_masters_are_those_of_masters_kept_by_hand_bit_for_bit[device]": DEVICE_BITS,
    RUN + "recompute_impure.py::test_a_large_buffer_is_not_copied_again_after_a_forward_without_change": ADDRESSES,
    RUN + "same_bits.py::test_sums_of_16_bit_gradients_keep_to_the_budget": BUDGET,
    RUN + "same_bits.py::test_what_gathered_took_above_the_budget_is_given_back": BUDGET,
    RUN + "state.py::test_arrays_of_numpy_made_of_an_entry_cannot_be_written_to": NUMPY,
    RUN + "threads.py::test_saves_of_another_thread_are_each_of_one_step": ON_CPU,
    RUN + "streaming.py::test_gathered_units_and_gradients_share_the_room_that_the_budget_leaves": BUDGET,
    RUN + "streaming.py::test_the_budget_that_a_refusal_names_holds_what_training_takes": BUDGET,
    RUN + "streaming.py::test_the_least_budget_holds_a_layer_that_runs_again_with_all_of_its_units": BUDGET,
    RUN + "streaming.py::test_the_least_budget_holds_sums_of_gradients_of_16_bits": BUDGET,
    RUN + "streaming.py::test_units_in_use_above_the_budget_are_named_with_the_budget_that_holds_them": BUDGET,
    RUN + "streaming.py::test_without_a_disk_there_is_next_to_no_staging": BUDGET,
    RUN + "transforms.py::test_transforms_give_inside_gathered_what_torch_gives[keep-forward": FORWARD_AD,
    RUN + "transforms.py::test_transforms_give_inside_gathered_what_torch_gives[keep-hessian": FORWARD_AD,
    RUN + "transforms.py::test_transforms_give_inside_gathered_what_torch_gives[keep-jacfwd": FORWARD_AD,
    RUN + "transforms.py::test_transforms_give_inside_gathered_what_torch_gives[keep-jvp": FORWARD_AD,
    RUN + "transforms.py::test_transforms_give_inside_gathered_what_torch_gives[recompute-forward": FORWARD_AD,
    RUN + "transforms.py::test_transforms_give_inside_gathered_what_torch_gives[recompute-hessian": FORWARD_AD,
    RUN + "transforms.py::test_transforms_give_inside_gathered_what_torch_gives[recompute-jacfwd": FORWARD_AD,
    RUN + "transforms.py::test_transforms_give_inside_gathered_what_torch_gives[recompute-jvp": FORWARD_AD,
    RUN + "update_in_backward.py::test_gradients_of_a_checkpoint_wait_for_step[device]": DEVICE_BITS,
    RUN + "update_in_backward.py::test_state_that_fits_in_memory_moves_in_no_step": BUDGET,
    RUN + "update_threads.py::test_an_update_that_is_waited_for_takes_all_cores": TIMING,
    API + "checkpoint.py::test_gradients_clipped_by_value_or_zeroed_in_place_resume_exactly": DEVICE_BITS,
    API + "dcp.py::test_writing_holds_one_tensor_whatever_the_size_of_the_model": HOST_MEMORY,
    API + "dcp_pieces.py::test_any_piece_of_a_tensor_that_was_cut_anyhow_is_as_torch_loads_it": HOST_MEMORY,
    API + "import.py::test_from_pretrained_gives_the_same_bits_with_few_pages_of_its_files_in_memory": HOST_MEMORY,
    API + "loading.py::test_conjugate_and_negative_views_come_back_as_they_were": CONJUGATES,
    API + "loading.py::test_joined_and_narrowed_arrays_read_as_torch_does": HOST_MEMORY,
    "tests/durability/test_faults.py::test_a_failed_save_stops_neither_the_training_nor_its_bits": DEVICE_BITS,
    "tests/durability/test_faults.py::test_a_fault_gives_the_right_bits_or_a_clear_error": DEVICE_BITS,
    "tests/durability/test_faults.py::test_late_and_reordered_requests_are_no_errors": DEVICE_BITS,
    "tests/models/test_around_the_loop.py::test_bf16_model_trains_like_one_with_masters_kept_by_hand": DEVICE_BITS,
    "tests/optim/test_rules.py::test_states_that_come_from_a_checkpoint_go_where_the_parameter_is": DEFAULT_DEVICE,
}
LEFT_OUT |= {
    f"{API}checkpoint.py::{test}[{size}-{which}{tiers}": DEVICE_BITS
    for test, which in (
        ("test_a_resumed_run_continues_bit_for_bit_on_any_tier", ""),
        ("test_a_save_in_mid_accumulation_resumes_exactly", "dtype0-"),
    )
    for size in ("small", "large")
    for tiers in ("device-host", "device-disk", "host-device", "disk-device")
}

GPU_BITS = "compares bits of a GPU's arithmetic with those of the host's, or ends with such a comparison"
MODELS = "tests/models/test_"

LEFT_OUT_ON_CUDA = {
    "tests/api/test_checkpoint.py::test_a_resumed_run_with_bf16_compute_keeps_its_masters": GPU_BITS,
    "tests/api/test_checkpoint_refusals.py::test_a_manifest_of_what_cannot_be_is_damage": ON_CPU,
    "tests/api/test_dcp_ranks.py": FORKS,
    "tests/api/test_documentation.py::test_notebook_runs": BUDGET,
    "tests/api/test_import.py::test_weights_that_transformers_saved_give_its_logits": GPU_BITS,
    "tests/api/test_prediction.py::test_an_example_is_a_dict_or_a_tuple_for_the_model": ON_CPU,
    "tests/api/test_prediction.py::test_a_step_of_a_model_that_is_prepared_or_cut_is_refused": ON_CPU,
    "tests/api/test_records.py": NUMPY,
    "tests/api/test_trace.py": ON_CPU,
    MODELS + "adapters.py::test_losses_are_those_of_plain_peft_and_the_base_is_never_written": BUDGET,
    MODELS + "adapters.py::test_a_checkpoint_of_what_is_trained_leaves_the_base_where_it_is": BUDGET,
    MODELS + "adapters.py::test_state_that_accelerate_saves_leaves_the_base_where_it_is": BUDGET,
    MODELS + "adapters.py::test_what_a_state_dict_has_of_a_unit_at_rest_is_no_garbage": BUDGET,
    MODELS + "adapters.py::test_adapters_are_merged_layer_by_layer_under_init": GPU_BITS,
    MODELS + "around_the_loop.py::test_a_layer_that_stays_in_memory_may_ask_the_cache_about_itself": BUDGET,
    MODELS + "around_the_loop.py::test_layers_are_recomputed_after_one_that_fills_the_cache": BUDGET,
    MODELS + "inference.py": BUDGET,
    "tests/optim/test_rules.py": GPU_BITS,
    "tests/programs/test_rank_programs.py": FORKS,
    RUN + "activations.py::test_what_the_user_saves_by_hooks_of_their_own_is_theirs": "plain torch fails: a mask's row",
    RUN + "amp.py::test_fp16_trains_as_with_masters_kept_by_hand": GPU_BITS,
    RUN + "bags_in_tiles.py::test_a_bag_and_a_layer_share_a_table": GPU_BITS,
    RUN + "beside_the_gate.py::test_vmap_over_a_parameter_is_as_in_torch": GPU_BITS,
    RUN + "choice.py::test_products_are_kept_where_only_they_fit": TIMING,
    RUN + "choice.py::test_masks_are_packed_where_that_makes_them_fit": TIMING,
    RUN + "delayed_update.py::test_every_tier_gives_the_same_bits": GPU_BITS,
    RUN + "disk_directories.py::test_a_limit_on_the_size_of_files_is_named": FORKS,
    RUN + "embedding.py::test_ids_outside_the_table_are_refused_with_its_name_and_range": GPU_BITS,
    RUN + "embedding.py::test_a_step_that_cannot_be_made_of_rows_changes_nothing": GPU_BITS,
    RUN + "gradients.py::test_a_backward_between_step_and_zero_grad_accumulates": GPU_BITS,
    RUN + "gradients.py::test_what_the_user_adds_in_place_is_part_of_the_gradient": GPU_BITS,
    RUN + "optimizers.py::test_factored_state_survives_a_checkpoint_on_another_tier": GPU_BITS,
    RUN + "optimizers.py::test_entries_of_a_state_that_replaces_the_optimizers_own_are_taken_over": GPU_BITS,
    RUN + "param_groups.py::test_large_finite_gradients_are_finite": "a GPU squares first, and overflows elsewhere",
    RUN + "parity.py::test_bf16_weights_and_masters_are_those_of_masters_kept_by_hand_bit_for_bit": GPU_BITS,
    RUN + "same_bits.py::test_the_norm_of_scaled_and_divided_gradients_is_that_of_their_values": GPU_BITS,
    RUN + "sequences.py": "asks for a row that is not there, after which a GPU does nothing more",
    RUN + "state.py::test_an_entry_is_written_as_a_whole": GPU_BITS,
    RUN + "weights_in_tiles.py::test_other_uses_of_weights_in_tiles_are_right[whole": GPU_BITS,
    RUN + "weights_in_tiles.py::test_state_and_checkpoints_are_as_without_tiles": GPU_BITS,
    RUN + "weights_in_tiles.py::test_gathered_shows_all_of_it": GPU_BITS,
}
"""What `--device cuda` leaves out besides."""
